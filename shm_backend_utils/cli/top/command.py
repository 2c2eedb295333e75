"""Watch shared memory, who has it mapped, and how many requests go by which path.

Without a terminal to draw on it looks once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final

from rich.console import Console
from rich.live import Live

from ...errors import MachineError
from ..signals import Interrupted, raise_on_signals
from .observer import Observer
from .snapshot import Snapshot
from .view import view

__all__ = ["add_arguments", "run"]

_DEFAULT_URL: Final = "http://localhost:8002"
_INTERVAL_S: Final = (0.1, 3600.0)
_STEP_S: Final = 0.1  # how soon a terminal that was resized is drawn anew


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--metrics-url",
        metavar="http://HOST:PORT",
        help=f"a server's metrics port; if it is given, --once and --json need an answer (default: {_DEFAULT_URL})",
    )
    parser.add_argument(
        "--interval", type=_interval, metavar="S", default=2.0, help="seconds between two looks (default: %(default)g)"
    )
    parser.add_argument(
        "--once", action="store_true", help="look once, which takes one interval for what is per second"
    )
    parser.add_argument("--json", action="store_true", help="look once, and print it as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Look until a signal ends it, which is as it should be: return 0 then."""
    try:
        raise_on_signals()
        return _run(arguments)
    except MachineError as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted:
        return 0


def _run(arguments: argparse.Namespace) -> int:
    url = _DEFAULT_URL if arguments.metrics_url is None else arguments.metrics_url
    if not url.startswith(("http://", "https://")):
        raise MachineError(f"{url!r} is no URL of a metrics port; expected http://HOST:PORT")
    console = Console(highlight=False)
    observer = Observer(url)
    if sys.stdout.isatty() and not console.is_dumb_terminal and not (arguments.once or arguments.json):
        _watch(observer, url, console, arguments.interval)
        return 0
    snapshot = _take_one(observer, arguments.interval, must_answer=arguments.metrics_url is not None)
    if arguments.json:
        print(json.dumps(snapshot.facts()))
    else:
        console.print(view(snapshot, url, console))
    return 0


def _take_one(observer: Observer, interval_s: float, *, must_answer: bool) -> Snapshot:
    """Take one snapshot, after waiting for what is per second, if there is anything.

    Raises
    ------
    MachineError
        The server must answer, and does not.
    """
    try:
        if observer.read_rates():
            time.sleep(interval_s)
    except MachineError:
        if must_answer:
            raise
    return observer.take()


def _watch(observer: Observer, url: str, console: Console, interval_s: float) -> None:
    """Draw one snapshot after another until a signal ends it."""
    live = Live(console=console, screen=True, auto_refresh=False, transient=True)
    try:
        live.start()
        while True:
            snapshot = observer.take()
            until = time.monotonic() + interval_s
            drawn_for = None
            while (left_s := until - time.monotonic()) > 0 or drawn_for is None:
                if drawn_for != console.size:
                    drawn_for = console.size
                    live.update(view(snapshot, url, console, drawn_for.height), refresh=True)
                time.sleep(min(_STEP_S, max(left_s, 0.0)))
    finally:
        live.stop()


def _interval(text: str) -> float:
    least, most = _INTERVAL_S
    seconds = float(text)
    if not least <= seconds <= most:
        raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g} seconds")
    return seconds
