"""The command `fxoffload`: one module per subcommand.

Subcommand modules import torch and the core inside their functions: `fxoffload --help` must not wait for them.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from fxoffload.cli import calibrate, check, diff, inspect, opt, plan, train
from fxoffload.errors import PlanError, VerifyError

FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130
# typer exports only its subclass; the class itself is click's in older versions and a vendored one in newer
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="A memory compiler for PyTorch training: plan and train inside byte budgets.",
)
for _command in (plan, train, inspect, diff, opt, calibrate, check):
    app.command(_command.__name__.rpartition(".")[2])(_command.run)


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. Accepted anywhere on the line.")] = False) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 it does not fit or training failed, 2 bad arguments. Errors are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models come from local folders; HF_HUB_OFFLINE=0 in the shell overrules
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    warnings.simplefilter("default" if debug else "ignore", FutureWarning)  # of our libraries about each other: no user can act on them
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels from the hub that nobody asked for
    logging.getLogger("fxoffload").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        return _run([word for word in words if word != "--debug"])
    except (Exception, KeyboardInterrupt) as error:  # the process ends here, and its status tells what kind of end it is
        if debug:
            traceback.print_exc()
        print(f"fxoffload: {' '.join(_message(error).split())}", file=sys.stderr)
        return _status(error)


def _run(words: list[str]) -> int:
    if not words:
        app(["--help"], prog_name="fxoffload", standalone_mode=False)
        return BAD_ARGUMENTS
    status = app(words, prog_name="fxoffload", standalone_mode=False)
    return status if isinstance(status, int) else 0


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, _USAGE_ERROR):
        return str(error.format_message())  # type: ignore[attr-defined]  # str() leaves the option's name out
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    if isinstance(error, (ValueError, PlanError, VerifyError, FloatingPointError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _status(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return BAD_ARGUMENTS if isinstance(error, (ValueError, _USAGE_ERROR)) else FAILED
