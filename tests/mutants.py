"""Does a test notice? Damages one thing at a time and runs the tests; every mutant must be killed by a test with a name.

    python tests/mutants.py [words that a mutant's name must contain]

A mutant is a context in which something is wrong: a line dropped from a sample graph, an effect dropped from an op, a rule of the
verifier switched off. Prints a table mutant -> test; exit status 1 when one survives. To add a family, write a generator and put
it in FAMILIES.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import samples

from fxoffload import buckets, liveness, ops, places, twin, verify, versions
from fxoffload.effects import Borrow
from fxoffload.runtime import arena
from fxoffload.testing.simulated_device import install

TESTS = Path(__file__).parent
VERIFIER = ("test_verify.py",)
GRAPHS = (*VERIFIER, "test_liveness.py")


@dataclass(frozen=True)
class Mutant:
    """`apply` makes the damage for as long as its context is open; `tests` are the files that must notice."""

    name: str
    apply: Callable[[], AbstractContextManager[None]]
    tests: tuple[str, ...] = VERIFIER


@dataclass
class Killer:
    """A pytest plugin that keeps the first test that fails, and what it says."""

    test: str | None = None
    ran: int = field(default=0)
    message: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed and self.test is None:
            self.test = report.nodeid
            self.message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Attribute `name` of `owner` (or its item, for a dict) is `value` inside."""
    if isinstance(owner, dict):
        before = owner[name]
        owner[name] = value
    else:
        before = getattr(owner, name)
        setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(owner, dict):
            owner[name] = before
        else:
            setattr(owner, name, before)


def without_lines() -> Iterator[Mutant]:
    """One release, wait, start, sink, gather or checkpoint less in a sample; its result, if it has one, is its source's."""
    for sample in ("LOWERED", "LOGICAL", "BUCKETS"):
        lines = getattr(samples, sample).splitlines(keepends=True)
        for i, line in enumerate(lines):
            if "fxo." in line:
                damaged = "".join(_without(lines, i))
                yield Mutant(f"{sample}: without {line.strip()}", lambda s=sample, d=damaged: changed(samples, s, d), GRAPHS)


def _without(lines: list[str], i: int) -> list[str]:
    line, rest = lines[i], lines[:i] + lines[i + 1 :]
    if not line.startswith("%"):
        return rest
    name = line.split(":")[0]
    source = line.split("fxo.")[1].split()[1].rstrip(",")
    return [_renamed(other, name, source) for other in rest]


def _renamed(line: str, name: str, source: str) -> str:
    for end in (",", "\n", ")", " "):
        line = line.replace(f" {name}{end}", f" {source}{end}").replace(f"({name}{end}", f"({source}{end}")
    return line


def early_releases() -> Iterator[Mutant]:
    """One release of a lowered sample before the last line that reads, makes or awaits."""
    for sample in ("LOWERED", "BUCKETS"):
        lines = getattr(samples, sample).splitlines(keepends=True)
        for i, line in enumerate(lines):
            if line.startswith("fxo.release"):
                at = max(k for k in range(i) if not lines[k].startswith("fxo.release"))
                damaged = "".join([*lines[:at], line, *lines[at:i], *lines[i + 1 :]])
                yield Mutant(f"{sample}: too early {line.strip()}", lambda s=sample, d=damaged: changed(samples, s, d))


def without_effects() -> Iterator[Mutant]:
    """One effect less in one op's Spec."""
    for op, spec in list(ops.SPECS.items()):
        for effect in spec.effects:
            fewer = replace(spec, effects=tuple(e for e in spec.effects if e is not effect))
            name = f"SPECS: {spec.name} without {type(effect).__name__}({effect.value})"
            # no rule of the verifier is about generator states; only the table of effects is
            tests = ("test_ops.py",) if "rng_state" in spec.name else (*VERIFIER, "test_ops.py")
            yield Mutant(name, lambda o=op, f=fewer: changed(ops.SPECS, o, f), tests)


def without_rules() -> Iterator[Mutant]:
    """One rule of the verifier switched off."""
    for name in sorted(vars(verify.Machine)):
        if name.startswith("_check_"):
            yield Mutant(f"verify: Machine.{name} off", lambda n=name: changed(verify.Machine, n, _nothing))
    for effect_type in verify.HANDLERS:
        name = f"verify: {effect_type.__name__} not handled"
        yield Mutant(name, lambda e=effect_type: changed(verify.HANDLERS, e, _nothing))
    for fact in verify.FACTS:
        yield Mutant(f"verify: fact {fact} always true", lambda f=fact: changed(verify.FACTS, f, _nothing))
    for name in ("_check_order", "_check_fits"):
        yield Mutant(f"verify: {name} off", lambda n=name: changed(verify, n, _nothing))
    yield Mutant("verify: views read bytes", lambda: changed(verify, "_needs_no_bytes", _no))
    yield Mutant("verify: no host scalar in device ops", lambda: changed(verify, "_may_be_anywhere", _no))
    yield Mutant("verify: in-place ops unseen", lambda: changed(verify, "_written", _none))


def without_twin() -> Iterator[Mutant]:
    """The reference runtime forgives."""
    yield Mutant("twin: memory is not poisoned", lambda: changed(twin, "_poison", _nothing))
    for name in ("_check_not_released", "_check_readable"):
        yield Mutant(f"twin: {name} off", lambda n=name: changed(twin._Twin, n, _nothing))


def without_borrow_in_liveness() -> Iterator[Mutant]:
    """insert-release with a liveness that does not know that a Transfer reads until its wait."""
    known = liveness._of_effect

    def blind(node: object, spec: object, effect_type: type, of: object) -> object:
        return () if effect_type is Borrow else known(node, spec, effect_type, of)  # type: ignore[arg-type]

    tests = ("test_liveness.py", "passes/test_insert_release.py")
    for test in tests:
        yield Mutant(f"liveness: borrows unknown ({test})", lambda: changed(liveness, "_of_effect", blind), (test,))


LLAMA = ("test_lowered.py",)
# Lines of the lowered Llama by what they are: its first group is the value's name, its last the source.
_LINES = {
    "gather wait": r"%(\S+@\d+): \S+ = fxo\.wait %((?:model|lm_head)\S+\.weight@\d+/in)",
    "swap_in wait": r"%(\S+/\S+@\d+): \S+ = fxo\.wait %(\S+)",
    "swap_out wait": r"%(\S+\^\d+): \S+ = fxo\.wait %(\S+)",
    "sink wait": r"%(\S+\.grad): \S+ = fxo\.wait %(\S+)",
    "bucket wait": r"%(bucket#\d+): \S+ = fxo\.wait %(\S+)",
    "part": r"%(\S+@\d+): \S+ = fxo\.part %(bucket#\d+), .*",
}
_PAIRS = {
    "gather": r"%((?:model|lm_head)\S+\.weight@\d+)/in: \S+ = fxo\.swap_in %([^\s,]+), device",
    "sink": r"%(\S+\.grad)/out: \S+ = fxo\.swap_out %([^\s,]+), .*",
}
N_EACH = 2


def lowered_llama() -> Iterator[Mutant]:
    """One transfer, wait, sink, clone or release less, or out of its order, in a really captured and lowered step."""
    lines = samples.llama().after.splitlines(keepends=True)
    for what, pattern in _LINES.items():
        for i, match in _some(lines, pattern):
            yield _llama(f"without the {what} {match[1]}", _renamed_all([*lines[:i], *lines[i + 1 :]], match[1], match[2]))
    for what, pattern in _PAIRS.items():
        for i, match in _some(lines, pattern):
            rest = [line for k, line in enumerate(lines) if k != i and not line.startswith(f"%{match[1]}: ")]
            yield _llama(f"without the {what} {match[1]}", _renamed_all(rest, match[1], match[2]))
    for i, match in _some(lines, r'%(\S+silu\S*~\d+): .* \{origin="([^"]+)"\}'):
        yield _llama(f"without the clone {match[1]}", _renamed_all([*lines[:i], *lines[i + 1 :]], match[1], match[2]))
    for i, match in _some(lines, r"fxo\.release %(\S+)"):
        yield _llama(f"without the release of {match[1]}", [*lines[:i], *lines[i + 1 :]])
        at = max(k for k in range(i) if f"%{match[1]}" in lines[k])
        yield _llama(f"release of {match[1]} before its last read", [*lines[:at], lines[i], *lines[at:i], *lines[i + 1 :]])
    for i, match in _some(lines, r"%(\S+@\d+)/in: \S+ = fxo\.swap_in %(\S+\^\d+), device"):
        ready = next(k for k, line in enumerate(lines) if line.startswith(f"%{match[2]}: "))
        yield _llama(f"return of {match[1]} before its swap_out is awaited", [*lines[:ready], lines[i], *lines[ready:i], *lines[i + 1 :]])
    for i, match in _some(lines, r"%(\S+o_proj\.weight@\d+)/in: \S+ = fxo\.swap_in %([^\s,]+), device"):
        other = lines[i].replace(f"%{match[2]},", f"%{match[2].replace('o_proj', 'k_proj')},")
        yield _llama(f"gather of another parameter as {match[1]}", [*lines[:i], other, *lines[i + 1 :]])
    yield from _damaged_buckets(lines)


def _damaged_buckets(lines: list[str]) -> Iterator[Mutant]:
    """A bucket with two of its sources exchanged, or with a part that looks at another's bytes."""
    for i, match in _some(lines, r"%(bucket#\d+)/in: \S+ = fxo\.swap_in_many \[.*q_proj\.weight.*k_proj\.weight.*\], device"):
        other = lines[i].replace("q_proj", "?").replace("k_proj", "q_proj").replace("?", "k_proj")
        yield _llama(f"with two sources of {match[1]} exchanged", [*lines[:i], other, *lines[i + 1 :]])
    for i, match in _some(lines, r"%(\S+k_proj\.weight@\d+): \S+ = fxo\.part %bucket#\d+, (\d+), .*"):
        other = lines[i].replace(f", {match[2]}, [", f", {int(match[2]) - 512}, [")
        yield _llama(f"with the part {match[1]} 512 bytes too early", [*lines[:i], other, *lines[i + 1 :]])


def _some(lines: list[str], pattern: str) -> list[tuple[int, re.Match[str]]]:
    """The first and the last lines that match, `N_EACH` in all. Raises RuntimeError when there are none."""
    found = [(i, match) for i, line in enumerate(lines) if (match := re.fullmatch(pattern, line.rstrip("\n")))]
    if not found:
        raise RuntimeError(f"no line of the lowered Llama matches {pattern}")
    return [*found[: N_EACH // 2], *found[-(N_EACH // 2) :]] if len(found) > N_EACH else found


def _renamed_all(lines: list[str], name: str, source: str) -> list[str]:
    return [_renamed(line, f"%{name}", f"%{source}") for line in lines]


def _llama(name: str, lines: list[str]) -> Mutant:
    damaged = replace(samples.llama(), after="".join(lines))
    return Mutant(f"Llama: {name}", lambda: changed(samples, "llama", lambda: damaged), LLAMA)


def broken_passes() -> Iterator[Mutant]:
    """One rule of a rewrite or planner switched off."""
    golden, modules = ("passes/test_golden.py",), {n: importlib.import_module(f"fxoffload.passes.{n}") for n in ("recompute", "plan_recompute", "sink_gradients", "insert_release", "insert_swap", "sink_waits")}
    yield Mutant("recompute: random ops draw again", lambda: changed(modules["recompute"], "is_random", _no), golden)
    yield Mutant("recompute: views are saved", lambda: changed(modules["recompute"], "is_view", _no), golden)
    yield Mutant("plan-recompute: written inputs are read again", lambda: changed(modules["plan_recompute"], "_writes", _no), ("passes/test_recompute.py",))
    yield Mutant("insert-gather: views keep an old copy", lambda: changed(versions._Versions, "_note_view", _nothing), golden)
    yield from broken_buckets()
    for name in ("sink_gradients", "insert_swap", "sink_waits"):
        yield Mutant(f"{name}: between a tuple and its elements", lambda n=name: changed(modules[n], "last_element", _itself), golden)


def broken_buckets() -> Iterator[Mutant]:
    """One rule of what is merged, how and where it lies switched off."""
    rewrite = importlib.import_module("fxoffload.passes.bucket_transfers")
    tests = ("passes/test_plan_buckets.py",)
    yield Mutant("plan-buckets: there is always room", lambda: changed(buckets._Room, "holds", _yes), tests)
    yield Mutant("plan-buckets: what is taken is not counted", lambda: changed(buckets._Room, "take", _nothing), tests)
    yield Mutant("plan-buckets: no copy is held up too long", lambda: changed(buckets, "_HELD_UP", 1 << 40), tests)
    yield Mutant("plan-buckets: parts are not padded", lambda: changed(buckets, "padded", _itself), tests)
    yield Mutant("bucket-transfers: members keep their releases", lambda: changed(rewrite, "_release_once", _nothing), ("passes/test_golden.py",))
    yield Mutant("arena: neighbours at any distance", lambda: changed(arena.Run, "takes", _takes_all), ("test_arena.py",))
    yield Mutant("arena: runs that leave it", lambda: changed(arena.Arena, "holds", _yes), ("test_arena.py",))
    yield Mutant("places: views move too", lambda: changed(places, "_alone", frozenset), ("test_buckets.py",))


def _takes_all(run: arena.Run, offset: int, n_bytes: int, address: int) -> bool:
    run.n_bytes = offset - run.offset + n_bytes
    return run.arena is not None


def _yes(*_: object) -> bool:
    return True


def _itself(value: object) -> object:
    return value


def _nothing(*_: object) -> None:
    return None


def _no(*_: object) -> bool:
    return False


def _none(*_: object) -> list[object]:
    return []


FAMILIES = (
    without_lines, early_releases, lowered_llama, broken_passes, without_effects, without_rules, without_twin, without_borrow_in_liveness,
)


def killer_of(mutant: Mutant) -> str | None:
    """The first test that fails under the mutant; None when all pass.

    Raises RuntimeError when no test ran, and when the damage is not the one that was meant: it cannot be called like what it replaces.
    """
    killer = Killer()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    with mutant.apply():
        pytest.main([*options, *(str(TESTS / name) for name in mutant.tests)], plugins=[killer])
    if not killer.ran:
        raise RuntimeError(f"{mutant.name}: no test ran")
    if re.match(r"TypeError: .*(positional argument|keyword argument)", killer.message):
        raise RuntimeError(f"{mutant.name}: {killer.message}")
    return killer.test


def main(words: list[str]) -> int:
    """Runs the mutants whose names contain all `words`."""
    install()  # before anything runs backward: autograd counts the devices then
    mutants = [m for family in FAMILIES for m in family() if all(word in m.name for word in words)]
    unharmed = killer_of(Mutant("none", lambda: changed(samples, "LOWERED", samples.LOWERED), tuple({t: 0 for m in mutants for t in m.tests})))
    if unharmed is not None:
        print(f"the tests fail without a mutant: {unharmed}")
        return 1
    rows = [(mutant, killer_of(mutant)) for mutant in mutants]
    width = max(len(mutant.name) for mutant, _ in rows)
    print("\n" + "\n".join(f"{mutant.name:<{width}}  {killer or 'SURVIVED'}" for mutant, killer in rows))
    survivors = [mutant.name for mutant, killer in rows if killer is None]
    print(f"\n{len(rows)} mutants, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
