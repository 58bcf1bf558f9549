"""The same training step by us and by our peers, each in a process of its own, one after the other.

    python bench/peers/run.py --row L1 [--peers fxoffload-bitwise,fsdp2,plain@none] [--out FILE] [--limit-s 240] [--total-s 570]
        [--lock FILE] [--traces FOLDER]
    python bench/peers/run.py --row L1 --tiny --device cpu          two narrow layers: does every peer run?
    python bench/peers/run.py --list

Every peer builds the same weights, takes the same batch and trains with AdamW's same settings. The cap is
`torch.cuda.set_per_process_memory_fraction`, of bytes that the caching allocator reserves, set before the model is loaded; "@none"
behind a peer's name lifts it. A step is forward, backward, optimizer's step and zeroing, by the clock between synchronizations, median of
the timed ones. The file is written after every peer, and one that is there already keeps its other rows. A peer that cannot run is a row
with its message; so is one that takes longer than --limit-s. What --total-s cuts off or leaves over has no row.
`host_rss_peak_bytes` counts loading too. `physical_limit_s` is of the row, cap and --machine, whoever runs it (`limit.py`, which can also
add it later to what --no-limit left without), `limit_share` is that by the measured seconds. Exit status 1 if a row of ours is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # started as a file: the folder of this file is on the path, the one of its package is not
    sys.path[0] = str(ROOT / "bench")

from peers.rows import ROWS, Row, limit_fields  # noqa: E402

# The same for all: segments that grow, so that the cap is not lost to fragments, and the workspace that fxoffload plans with.
ENVIRONMENT = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
# Where DeepSpeed builds its C++ ops, once for all peers of a machine.
EXTENSIONS = Path(tempfile.gettempdir()) / "fxoffload-peers-extensions"
# In the environment of all processes of a peer.
MARK = "FXOFFLOAD_PEER"
# A peer is not started for less.
LEAST_S = 30
UNCAPPED = "@none"
# Characters of a failed peer's output that are printed to standard error.
TAIL = 8000
# A line of a log that says what went wrong.
TELLING = re.compile(r"\w*(Error|Exception)\b:")
# Where the packages of a machine lie is not what a message is about.
FOLDERS = re.compile(r"/(?:[\w.+-]+/)+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="", help="rows, by comma")
    parser.add_argument("--peers", default="", help="peers, by comma; default: those of the row")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--total-s", type=float, default=float("inf"))
    parser.add_argument("--lock", type=Path, help="a file: runs that have the same one prepare beside each other and measure one by one")
    parser.add_argument("--traces", type=Path, help="a folder: one step more is traced, its copies and gaps are in the row, its trace there")
    parser.add_argument("--machine", help="whose rates the physical limit has; default: h200, for a CPU cpu")
    parser.add_argument("--no-limit", action="store_true", help="leaves the physical limit to limit.py --into")
    parser.add_argument("--list", action="store_true", help="rows and peers")
    chosen = parser.parse_args()
    if chosen.list:
        print(listing())
        return 0
    started = time.perf_counter()
    done: list[dict[str, Any]] = []
    machine = chosen.machine or ("cpu" if chosen.device == "cpu" else "h200")
    limits: dict[str, Any] = {}
    for row, name in runs(parser, chosen.row, chosen.peers):
        if row.name not in limits and not chosen.no_limit:
            limits[row.name] = limits_of(row, machine, chosen.tiny)
        left_s = chosen.total_s - (time.perf_counter() - started)
        measured = None if left_s < LEAST_S else started_alone(
            row, name, chosen.device, chosen.tiny, min(chosen.limit_s, left_s), chosen.lock, chosen.traces)
        if measured is None or (measured["process_s"] >= left_s and "error" in measured):
            print(f"{row.name:7s} {name}: no time left", flush=True)
            continue
        if not chosen.no_limit:
            measured |= limit_fields(limits[row.name], measured)
        done.append(measured)
        print(line(measured), flush=True)
        if chosen.out is not None:
            write(chosen.out, done)
    return int(any("error" in one for one in done if one["peer"].startswith("fxoffload")))


def runs(parser: argparse.ArgumentParser, rows: str, peers: str) -> list[tuple[Row, str]]:
    """What is to be run, in order. Ends the process with status 2 when a row is not known."""
    names = [name for name in rows.split(",") if name]
    unknown = [name for name in names if name not in ROWS]
    if unknown or not names:
        parser.error(f"--row: one or more of {', '.join(ROWS)}")
    asked = tuple(name for name in peers.split(",") if name)
    return [(ROWS[name], peer) for name in names for peer in asked or ROWS[name].peers]


def limits_of(row: Row, machine: str, tiny: bool) -> dict[str, Any]:
    """What `limit.py` says of the row, in a process of its own that sees no accelerator."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "limit.json"
        command = [sys.executable, "-m", "peers.limit", "--row", row.name, "--machine", machine, "--out", str(out), *["--tiny"] * tiny]
        subprocess.run(command, check=True, cwd=ROOT, env={**environment(), "CUDA_VISIBLE_DEVICES": ""}, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def started_alone(
    row: Row, name: str, device: str, tiny: bool, limit_s: float, lock: Path | None = None, traces: Path | None = None,
) -> dict[str, Any]:
    """The row of one peer, measured by a process of its own that is gone, with all it started, when this returns."""
    peer, uncapped = name.removesuffix(UNCAPPED), name.endswith(UNCAPPED) or row.cap_bytes is None
    shown = row.tiny if tiny else row
    head = {"row": row.name, "peer": peer, "cap_bytes": None if uncapped else row.cap_bytes}
    head |= {key: value for key, value in asdict(shown).items() if key in ("shape", "trained", "batch", "length")}
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "row.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "peers.measure", "--row", row.name, "--peer", peer, "--device", device, "--out", str(out)]
        command += ["--uncapped"] * uncapped + ["--tiny"] * tiny
        command += ["--lock", str(lock)] if lock is not None else []
        command += ["--trace", str(traces / f"{row.name}-{name}.json.gz")] if traces is not None else []
        began = time.perf_counter()
        status = ended(command, environment(), log, limit_s)
        took_s = time.perf_counter() - began
        if status is None:
            for lock in EXTENSIONS.rglob("lock"):  # of a builder that was ended with it: the next would wait for ever
                lock.unlink()
        text = log.read_text(errors="replace")
        said: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"error": last_words(status, limit_s, text)}
    if "error" in said:
        said["error"] = FOLDERS.sub("", said["error"])
        print(text[-TAIL:], file=sys.stderr, flush=True)
    return {**head, **said, "process_s": took_s}


def ended(command: Sequence[str], env: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Exit status of the command, None when it was stopped after `limit_s`; its output is in `log`."""
    token = uuid.uuid4().hex
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**env, MARK: token}, cwd=ROOT)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(token)
            process.wait()


def stop(token: str) -> None:
    """Ends the processes that were started with the token, and those that they started: builders put theirs into groups of their own."""
    while left := [one for one in psutil.process_iter() if is_marked(one, token)]:
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(0.05)


def is_marked(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(MARK) == token
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or another user's
        return False


def environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"MASTER_PORT": str(free_port()), "TORCH_EXTENSIONS_DIR": str(EXTENSIONS), "PYTHONPATH": os.pathsep.join(path)}
    return {**os.environ, **ENVIRONMENT, **own}


def free_port() -> int:
    """One on which nobody listens: process groups of one process want it all the same."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def last_words(status: int | None, limit_s: float, log: str) -> str:
    """Why there is no row: the time that was up or the signal that ended it, and the last line it said that tells of an error, or else the last."""
    why = f"no row within {limit_s:.0f} s" if status is None else f"exit status {status}"
    lines = log.strip().splitlines()
    telling = [line for line in lines if TELLING.search(line)] or lines
    return f"{why}; last: {telling[-1][:300]}" if telling else why


def write(path: Path, done: list[dict[str, Any]]) -> None:
    """The rows of this run, and of an earlier one those that this run has not made again."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    made = {key(row) for row in done}
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    report = {"command": " ".join(["python", "bench/peers/run.py", *without_out(sys.argv[1:])]),
              "commit": head.stdout.strip() if head.returncode == 0 else None,
              "rows": [row for row in earlier if key(row) not in made] + done}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["row"], row["peer"], row["cap_bytes"]


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments but where they write."""
    return [a for i, a in enumerate(arguments) if "--out" not in arguments[max(i - 1, 0) : i + 1]]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    cap = "no cap" if row["cap_bytes"] is None else f"{row['cap_bytes'] / 2**30:.0f} GiB"
    name = f"{row['row']:7s} {row['peer']:31s} {cap:7s}"
    if "error" in row:
        return f"{name} {row['error'][:200]}  [{row['process_s']:.0f} s]"
    memory = "" if row["reserved_bytes"] is None else f"{row['reserved_bytes'] / 2**30:6.2f} GiB reserved, "
    share = f"{row['limit_share']:.0%} of the limit, " if "limit_share" in row else ""
    return (f"{name} {row['step_s']:8.4f} s {row['tokens_per_s']:9.1f} tokens/s  {share}{memory}loss {row['loss_first']:.6f} to {row['loss_last']:.6f}, "
            f"class {row['precision'][0]}  [{row['process_s']:.0f} s]")


def listing() -> str:
    """Rows and peers in words. Imports the peers, and so torch."""
    from peers.table import PEERS

    rows = [f"{row.name:8s} {row.title:24s} {'no cap' if row.cap_bytes is None else f'{row.cap_bytes >> 30} GiB':7s} {' '.join(row.peers)}"
            for row in ROWS.values()]
    return "\n".join(["rows", *rows, "", "peers", *(f"{name:31s} {peer.told}" for name, peer in PEERS.items())])


if __name__ == "__main__":
    sys.exit(main())
