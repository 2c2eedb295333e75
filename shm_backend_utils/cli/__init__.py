"""The command ``shm-backend-utils``, with a module or a package of this folder for each of its commands.

A command's module is imported only when you run that command, so ``regions`` works where only NumPy is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from .. import __version__
from .terminal import ENDING, Interrupted, raise_on_signals

__all__ = ["COMMANDS", "main"]

_PROGRAM: Final = "shm-backend-utils"


class Command(NamedTuple):
    """One command."""

    name: str  # as it is typed; its module has the same name
    summary: str  # one line for --help
    extra: str = ""  # the distribution's extra with its requirements; empty if it needs none


COMMANDS: Final = (
    Command("serve", "run a Triton server without Docker, for development", "server"),
    Command("demo", "send photographs through a server on every path", "demo"),
    Command("doctor", "find out what keeps requests from the direct path", "client"),
    Command("regions", "list our shared-memory regions"),
)
GONE: Final[dict[str, str]] = {
    "bench": "`scripts/bench` in a checkout",
    "top": "Triton's metrics port, with SHM_METRICS in config.pbtxt, and `shm-backend-utils regions`",
    "vendor": "`pip install --no-deps --target MODEL_DIR/VERSION WHEEL`",
}
"""Replacements of commands that earlier versions had, each worded to follow "use"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    if sys.stdout is None:  # the parent process has closed it
        print(f"{_PROGRAM}: standard output is closed", file=sys.stderr)
        return 1
    with _interrupts_end_it():
        chosen = _parsed(list(sys.argv[1:] if arguments is None else arguments))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have characters that it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    _tell_what_is_fetched()
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        raise_on_signals()
        status: int = chosen.run(chosen)
        sys.stdout.flush()  # a failed write must change the exit status
    except OSError as error:
        _let_go_of_output()
        if not isinstance(error, BrokenPipeError):  # there, the reader wants no more output
            print(f"{_PROGRAM} {chosen.command}: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as end:  # a command's library may raise the latter
        return 128 + getattr(end, "number", signal.SIGINT)  # as shells report a program that a signal has ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status


def _parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="What comes with shm_backend_utils.")
    parser.add_argument("--version", action="version", version=f"triton-shm-backend-utils {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    asked_for = next((word for word in given if not word.startswith("-")), "")
    if asked_for in GONE:
        parser.exit(2, f"{_PROGRAM} has no {asked_for} any more: use {GONE[asked_for]}\n")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary)
        if command.name == asked_for:
            _prepare(command, subparser)
    return parser.parse_args(given)


@contextlib.contextmanager
def _interrupts_end_it() -> Iterator[None]:
    """Let Ctrl-C end the process silently: packages that are interrupted during their import print long tracebacks."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # it is ignored, or has another handler
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _let_go_of_output() -> None:
    """Flush standard output; if that fails, point it at /dev/null, so that Python does not report the error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _StandardError(logging.Handler):
    """Writes to the current standard error, which a progress bar replaces while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _tell_what_is_fetched() -> None:
    """Log to standard error when the server is downloaded at its first use, which takes a while."""
    logger = logging.getLogger("shm_backend_utils.server")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_StandardError())


def _prepare(command: Command, parser: argparse.ArgumentParser) -> None:
    """Give a command's parser its description, its arguments and its function."""
    with _name_missing(command, parser):
        module: Any = importlib.import_module(f".{command.name}", __name__)
    parser.description = module.__doc__
    module.add_arguments(parser)
    parser.set_defaults(run=_name_missing(command, parser)(module.run))


@contextlib.contextmanager
def _name_missing(command: Command, parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the process if a package of the command's extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not (command.extra and missing) or missing == __name__.partition(".")[0]:
            raise
        remedy = f"pip install 'CHECKOUT_OR_WHEEL[{command.extra}]'"
        parser.exit(1, f"{parser.prog} needs {missing}, which is not installed: {remedy}\n")
