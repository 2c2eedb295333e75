"""What the GPU check found: one line for each check as it ends, and one JSON file, whole after every check."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["CheckFailedError", "Figure", "Outcome", "Report", "SkippedError", "require"]


class CheckFailedError(Exception):
    """Something is not as it must be."""


class SkippedError(Exception):
    """This machine lacks what the check needs."""


def require(condition: bool, otherwise: str) -> None:
    """Raise CheckFailedError unless a condition holds."""
    if not condition:
        raise CheckFailedError(otherwise)


@dataclass(frozen=True)
class Outcome:
    """How one check ended: ``status`` is PASS, FAIL or SKIP. ``trace`` is there if it raised."""

    group: str
    name: str
    status: str
    detail: str
    seconds: float
    trace: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure; ``limit`` is the most that it may be, None if it is held to nothing."""

    group: str
    name: str
    figure: float
    unit: str
    limit: float | None
    basis: str


class Report:
    """The outcomes, the figures, and what they were found on.

    Parameters
    ----------
    machine : mapping
        What the JSON file begins with.
    file : pathlib.Path
        Written anew after every check, so that it is there even if a check takes the process with it.
    """

    def __init__(self, machine: Mapping[str, Any], file: Path) -> None:
        self.outcomes: list[Outcome] = []
        self.figures: list[Figure] = []
        self.machine = dict(machine)
        self._file = file

    def run(self, group: str, name: str, check: Callable[[], str]) -> Outcome:
        """Run a check, which returns a detail. Whatever it raises ends it alone."""
        begin, trace = time.perf_counter(), ""
        try:
            status, detail = "PASS", check()
        except SkippedError as error:
            status, detail = "SKIP", str(error)
        except CheckFailedError as error:
            status, detail = "FAIL", str(error)
        except Exception as error:
            status, detail, trace = "FAIL", f"{type(error).__name__}: {error}", traceback.format_exc()
        outcome = Outcome(group, name, status, detail, round(time.perf_counter() - begin, 3), trace)
        self.outcomes.append(outcome)
        print(f"{status}  {group}: {name}{f' ({detail})' if detail else ''}".replace("\n", " "), flush=True)
        self.write()
        return outcome

    def measured(self, figure: Figure) -> str:
        """Keep a figure and return it in words; raises CheckFailedError if it is above its limit."""
        self.figures.append(figure)
        held_to = "" if figure.limit is None else f", held to at most {figure.limit:g}"
        words = f"{figure.figure:.3g} {figure.unit}{held_to}, from {figure.basis}"
        require(figure.limit is None or figure.figure <= figure.limit, words)
        return words

    @property
    def failed(self) -> list[Outcome]:
        """The checks that failed."""
        return [outcome for outcome in self.outcomes if outcome.status == "FAIL"]

    def write(self) -> None:
        """Write the file."""
        content = {
            **self.machine,
            "failed": len(self.failed),
            "checks": [asdict(outcome) for outcome in self.outcomes],
            "figures": [asdict(figure) for figure in self.figures],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(content, indent=2) + "\n")
