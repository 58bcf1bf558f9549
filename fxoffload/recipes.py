"""Recipes of recomputation: at which prices, and in how many of the repeated blocks, values are made again instead of copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .liveness import Liveness
from .pipeline import Option
from .plans import Decision
from .problem import Problem, decide

# Of what a value's copies take, what making it again may take: the less, the more is copied instead. Making again what takes more than `MIDDLE`
# is worth it only where no more can be copied.
MIDDLE = 1 / 4
_PRICES = (1 / 32, 1 / 16, 1 / 8, MIDDLE, 1.0)
# Whatever its copies take: where the host has no room for them.
_ANY_PRICE = 1e6


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to choose what is recomputed: the options of plan-recompute."""

    keep: str
    blocks: int = -1
    price: float = 1.0

    def __str__(self) -> str:
        words = {"all": "saves everything", "costly": "computes cheap ops again"}
        share = "" if self.price == 1 else f"{self.price:g} of "
        what = f"what takes less than {share}its copies" if self.price < _ANY_PRICE else "what can be made again"
        return words.get(self.keep, f"computes again, in {self.blocks} blocks, {what}")


def recipes(problem: Problem) -> list[Recipe]:
    """In the order of what they recompute: nothing, then in all blocks at one price after the other. Where there are no blocks, nothing and
    what is cheap."""
    n_blocks = problem.n_blocks
    if not n_blocks:
        return [Recipe("all"), Recipe("costly")]
    most = [] if problem.host_bytes is None else [_ANY_PRICE]
    return [Recipe("all"), *(Recipe("blocks", n_blocks, price) for price in (*_PRICES, *most))]


def in_parts(ordered: Sequence[Recipe]) -> list[Recipe]:
    """The recipe of the middle price in a quarter, half and three quarters of the blocks."""
    whole = next((one for one in ordered if one.keep == "blocks" and one.price == MIDDLE), None)
    return [replace(whole, blocks=whole.blocks * quarters // 4) for quarters in (1, 2, 3)] if whole is not None and whole.blocks >= 4 else []


def beside(recipe: Recipe, ordered: Sequence[Recipe]) -> list[Recipe]:
    """The recipe in an eighth of all blocks more and less, where it is one of `in_parts`."""
    parts = in_parts(ordered)
    if recipe not in parts:
        return []
    eighth = parts[1].blocks // 4
    return [replace(recipe, blocks=recipe.blocks + more) for more in (eighth, -eighth) if eighth]


def every_recipe(problem: Problem) -> list[Recipe]:
    """Those that a large step may be searched with at all."""
    ordered = recipes(problem)
    parts = in_parts(ordered)
    return [*ordered, *parts, *(other for one in parts for other in beside(one, ordered))]


def recipes_of_small(problem: Problem) -> list[Recipe]:
    """Those that small steps are searched with, in the same order: prices below the middle one changed the seconds of 3 of 20 (those of
    bench/plan_quality.py), by 0.4 % at most, and take time."""
    first, *others = recipes(problem)
    return [first, *in_parts(others), *(one for one in others if one.keep != "blocks" or one.price >= MIDDLE)]


def decided(problem: Problem, recipe: Recipe, live: Liveness | None = None) -> tuple[Decision, ...]:
    """What the recipe recomputes. `live`: the Liveness of the problem's graph, where it is known."""
    options: dict[str, Option] = {"keep": recipe.keep, "blocks": recipe.blocks, "price": recipe.price}
    context = replace(problem.context, options=options, live=live, machine=problem.machine)
    return decide("plan-recompute", problem.graph, context)
