"""What the GPU check found: a text, line by line as it is found, and one JSON file, whole after every check."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from .. import ROOT
from .. import figures as common

__all__ = ["CheckFailedError", "Figure", "NotOnAFakeError", "Outcome", "Report", "require"]

TEXT_FILE: Final = "report.txt"
JSON_FILE: Final = "report.json"


class CheckFailedError(Exception):
    """Something is not as it must be."""


class NotOnAFakeError(Exception):
    """A fake GPU ends here: what comes next in this check, only a GPU can do. On a GPU it is a failure."""


def require(condition: bool, otherwise: str) -> None:
    """Raise CheckFailedError unless a condition holds."""
    if not condition:
        raise CheckFailedError(otherwise)


@dataclass(frozen=True)
class Outcome:
    """How one check ended; ``trace`` is there if it raised.

    ``status`` is PASS or FAIL, or PART if it was rehearsed as far as a fake GPU goes. Nothing is skipped: what was
    asked for and cannot be run has failed.
    """

    group: str
    name: str
    status: str
    detail: str
    seconds: float
    trace: str = ""


@dataclass(frozen=True)
class Figure(common.Figure):
    """A figure of the check.

    Attributes
    ----------
    group : str
        The level that it was measured at.
    binds : bool
        Whether a figure beyond its limit fails the check.
    """

    group: str = ""
    binds: bool = True

    @property
    def limit(self) -> str:
        """The limit in words, and whether it is held."""
        if self.is_held is None:
            return "no limit"
        return f"{self.held_to}, {'held' if self.is_held else 'NOT HELD'}{'' if self.binds else ' (not binding here)'}"

    def __str__(self) -> str:
        return f"{self.group}: {self.name}: {self.figure:.3g} {self.unit} ({self.basis}); {self.limit}"


class Report:
    """The outcomes, the figures, and what they were found on.

    Parameters
    ----------
    title : str
        What the report begins with.
    machine : mapping
        What it was found on, by what it is.
    folder : pathlib.Path
        For the two files, which are there even if a check takes the process with it.
    is_fake : bool
        Whether there was no GPU. The figures say nothing then: they are called what they are, and held to nothing.
    """

    def __init__(self, title: str, machine: Mapping[str, str], folder: Path, *, is_fake: bool) -> None:
        self.title = title
        self.machine = dict(machine)
        self.outcomes: list[Outcome] = []
        self.figures: list[Figure] = []
        self.is_fake = is_fake
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._text = ""
        self._say(title, "", *[f"{what}: {value}" for what, value in self.machine.items()], "")
        self._write_json()

    def run(self, group: str, name: str, check: Callable[[], str]) -> Outcome:
        """Run a check, which returns a detail. Whatever it raises ends it alone."""
        begin, trace = time.perf_counter(), ""
        try:
            status, detail = "PASS", check()
        except NotOnAFakeError as error:
            status, detail = "PART" if self.is_fake else "FAIL", str(error)
        except CheckFailedError as error:
            status, detail = "FAIL", str(error)
        except Exception as error:
            status, detail = "FAIL", f"{type(error).__name__}: {error}"
            trace = traceback.format_exc().replace(f"{ROOT}/", "")
        outcome = Outcome(group, name, status, detail, round(time.perf_counter() - begin, 3), trace)
        self.outcomes.append(outcome)
        self._say(f"{status}  {group}: {name}{f' ({detail})' if detail else ''}".replace("\n", " "))
        self._write_json()
        return outcome

    def learned(self, what: str, value: str) -> None:
        """Add to what is known of the machine."""
        self.machine[what] = value
        self._say(f"{what}: {value}")

    def measured(self, *figures: Figure) -> str:
        """Keep figures and return the last one in words; raises CheckFailedError if one is beyond its limit."""
        if self.is_fake:
            self.figures += [replace(figure, at_most=None, at_least=None) for figure in figures]
            return ""
        self.figures += figures
        beyond = [str(figure) for figure in figures if figure.binds and figure.is_held is False]
        require(not beyond, "; ".join(beyond))
        return str(figures[-1])

    def finish(self) -> None:
        """Say what came out."""
        self._say("", "Figures of a fake GPU, which say nothing of any GPU:" if self.is_fake else "Figures:")
        self._say(*[f"  {figure}" for figure in self.figures] or ["  none"])
        counts = {status: self._count(status) for status in ("PASS", "FAIL", "PART")}
        in_part = f", {counts['PART']} rehearsed in part, as a fake goes no further" if self.is_fake else ""
        total = f"{counts['PASS']} checks passed, {counts['FAIL']} failed{in_part}"
        others = [each for each in self.outcomes if each.status != "PASS"]
        self._say("", total, *[f"  {each.status}  {each.name}: {each.detail}" for each in others])
        self._write_json()

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return self._count("FAIL") > 0

    def _count(self, status: str) -> int:
        return [outcome.status for outcome in self.outcomes].count(status)

    def _say(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        print(text, end="", flush=True)
        self._text += text
        (self._folder / TEXT_FILE).write_text(self._text)

    def _write_json(self) -> None:
        figures = [{**asdict(figure), "is_held": figure.is_held} for figure in self.figures]
        content = {
            "title": self.title,
            "machine": self.machine,
            "failed": self._count("FAIL"),
            "checks": [asdict(outcome) for outcome in self.outcomes],
            "figures_of_a_fake_gpu" if self.is_fake else "figures": figures,
        }
        (self._folder / JSON_FILE).write_text(json.dumps(content, indent=2) + "\n")
