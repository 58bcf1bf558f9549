"""A Session is started for a model, and another one in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from torch import nn

from .heap import heap_at_rest
from .machine import Machine
from .plans import Plan
from .router import Sample
from .session import Options, Session


def start(
    model: nn.Module, samples: Sequence[Sample], options: Options, machine: Machine, plan: Plan | None,
    met: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Compiles the model for the samples' calls, for shapes of the batch up to those that were `met`. Where that fails the model is as it
    was."""
    with ExitStack() as undo:
        session = Session(model, options, machine, plan)
        undo.callback(session.close)
        session.router.met = dict(met or {})
        session.places.settle_constants()
        with heap_at_rest():
            for sample in samples:
                with sample.entered():
                    session.router.capture(sample.args, sample.kwargs)
            session.litter.sweep()
        session.settle()
        undo.pop_all()


def restart(session: Session, sample: Sample, machine: Machine, plan: Plan) -> None:
    """Another Session in the place of this one, by a plan that covers the sample's step. Where that fails the model is the plain one."""
    model, met = session.model, session.router.largest
    # What a client has put around forward since compile (Accelerate does) stays around it.
    around = model.__dict__.pop("forward", None)
    try:
        session.close()
        start(model, [sample], session.options, machine, plan, met)
    finally:
        if around is not None:
            model.__dict__["forward"] = around
