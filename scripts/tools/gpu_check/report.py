"""What the GPU check found: a text, line by line as it is found, and one JSON file, whole after every check."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from shm_backend_utils.cli.common.rounds import Times, shuffled

from .. import ROOT
from .. import figures as common

TEXT_FILE: Final = "report.txt"
JSON_FILE: Final = "report.json"

MOST_OF_EMPTY: Final = 1.2
MOST_OF_THE_FLOOR: Final = 1.1
KERNELS: Final = {"cupy": "gpu_multiply", "torch": "torch.mul", "neither": "a copy on the GPU"}
"""What the kernel is that a call is measured with, by library."""

_WARM_UP_ROUNDS: Final = 20


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
    """A figure of the check."""

    group: str = ""  # the level that it was measured at
    binds: bool = True  # whether a figure beyond its limit fails the check

    @property
    def limit(self) -> str:
        """The limit in words, and whether it is held."""
        if self.is_held is None:
            return "no limit"
        return f"{self.held_to}, {'held' if self.is_held else 'NOT HELD'}{'' if self.binds else ' (not binding here)'}"

    def __str__(self) -> str:
        return f"{self.group}: {self.name}: {self.figure:.3g} {self.unit} ({self.basis}); {self.limit}"


class Report:
    """The outcomes, the figures, and what they were found on."""

    def __init__(self, title: str, machine: Mapping[str, str], folder: Path, *, is_fake: bool) -> None:
        self.title = title  # what the report begins with
        self.machine = dict(machine)  # what it was found on, by what it is
        self.outcomes: list[Outcome] = []
        self.figures: list[Figure] = []
        self.is_fake = is_fake  # there was no GPU: the figures say nothing, and are held to nothing
        self._folder = folder  # for the two files, which are there even if a check takes the process with it
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


@dataclass(frozen=True)
class Amounts:
    """How much is done."""

    rounds: int  # how often each case is measured
    identity_bytes: tuple[int, ...]  # from the smallest to the largest
    large_bytes: int  # of the input of everything else that is measured
    slow_rounds: int  # how often that is measured which takes tens of milliseconds
    requests: int  # so many requests over so many regions of this size
    regions: int
    region_bytes: int


FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 30, 10_000, 64, 2**22)
SMALL: Final = Amounts(3, (2**10, 2**12, 2**16), 2**16, 2, 30, 6, 2**14)


def medians_ms(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run every case once per round, after some rounds to warm up; return medians."""
    times = Times(cases)
    for round_number in range(-min(_WARM_UP_ROUNDS, rounds), rounds):
        for name in shuffled(cases, round_number):
            begin = time.perf_counter()
            cases[name]()
            times.add(name, round_number, begin)
    return times.medians()


def identity_figures(
    group: str, what: str, medians: Mapping[str, float], sizes: Sequence[int], *, is_held: bool, binds: bool
) -> list[Figure]:
    """Return what identity takes at each size, over an empty request; medians are by :func:`name_of` and "empty"."""
    return [
        Figure(
            f"{what} of {name}",
            medians[name] / medians["empty"],
            "× an empty request",
            f"{medians[name]:.4f} ms / {medians['empty']:.4f} ms",
            at_most=MOST_OF_EMPTY if is_held else None,
            group=group,
            binds=binds,
        )
        for name in map(name_of, sizes)
    ]


def kernel_figure(group: str, library: str, medians: Mapping[str, float], byte_size: int, *, binds: bool) -> Figure:
    """Return what a call takes that has the GPU do one thing, over its parts; of "call", "kernel" and "empty"."""
    floor = medians["kernel"] + medians["empty"]
    return Figure(
        f"{KERNELS[library]} of {name_of(byte_size)}",
        medians["call"] / floor,
        "× (the kernel alone + an empty request)",
        f"{medians['call']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)",
        at_most=MOST_OF_THE_FLOOR,
        group=group,
        binds=binds,
    )


def name_of(byte_size: int) -> str:
    """Return a size in words."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if byte_size >= factor:
            return f"{byte_size / factor:g} {unit}"
    return f"{byte_size} B"
