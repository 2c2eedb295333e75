"""What the GPU check measures and finds: a text, line by line as it comes, and JSON that is whole after every check."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from .. import ROOT
from ..figures import Figure, in_words, medians_ms

_Error = TypeVar("_Error", bound=Exception)


class CheckFailedError(Exception):
    """A check has found an error."""


class NotOnAFakeError(Exception):
    """A fake GPU cannot do the rest of this check. On a real GPU, this is a failure."""


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckFailedError(otherwise)


def raised(
    kind: type[_Error], otherwise: str, call: Callable[..., object], *arguments: object, **named: object
) -> _Error:
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    raise CheckFailedError(otherwise)


class Outcome(NamedTuple):
    """How one check ended. Nothing is skipped: what was asked for and cannot be run has failed."""

    group: str
    name: str
    status: str  # PASS or FAIL, or PART if it was rehearsed as far as a fake GPU goes
    detail: str
    trace: str = ""  # of an error that is no CheckFailedError


def _line(group: str, figure: Figure) -> str:
    limit = {None: "no limit", True: f"{figure.held_to}, held", False: f"{figure.held_to}, NOT HELD"}[figure.is_held]
    return f"{group}: {figure.name}: {figure.figure:.3g} {figure.unit} ({figure.basis}); {limit}"


class Report:
    def __init__(self, machine: Mapping[str, str], folder: Path, *, is_fake: bool) -> None:
        self.outcomes: list[Outcome] = []
        self.figures: list[tuple[str, Figure]] = []  # each with its group
        real, fake = "shm_backend_utils on a GPU", "REHEARSAL ON A FAKE GPU: nothing here was measured on a GPU"
        self._title = fake if is_fake else real
        self._machine = dict(machine)  # what it was found on, by what it is
        self._is_fake = is_fake  # there was no GPU: the figures say nothing, and are held to nothing
        self._folder = folder  # for the two files, which are there even if a check takes the process with it
        self._folder.mkdir(parents=True, exist_ok=True)
        self._text = ""
        self._running = ""  # the check, by which a report that ends early tells where
        self._say(self._title, "", *[f"{what}: {value}" for what, value in machine.items()], "")

    def run(self, group: str, name: str, check: Callable[[], str | None]) -> bool:
        """Run a check, which may return a detail, and return whether it passed. Whatever it raises ends it alone."""
        trace = ""
        self._running = f"{group}: {name}"
        self._write()
        try:
            status, detail = "PASS", check() or ""
        except NotOnAFakeError as error:
            status, detail = "PART" if self._is_fake else "FAIL", str(error)
        except CheckFailedError as error:
            status, detail = "FAIL", str(error)
        except Exception as error:
            status, detail = "FAIL", f"{type(error).__name__}: {error}"
            trace = traceback.format_exc().replace(f"{ROOT}/", "")
        self.outcomes.append(Outcome(group, name, status, detail, trace))
        self._running = ""
        self._say(f"{status}  {group}: {name}{f' ({detail})' if detail else ''}".replace("\n", " "))
        return status == "PASS"

    def measure(self, group: str, name: str, measure: Callable[[], Sequence[Figure]]) -> None:
        def check() -> str:
            figures = measure()
            if self._is_fake:
                self.figures += [(group, replace(figure, at_most=None, at_least=None)) for figure in figures]
                return ""
            self.figures += [(group, figure) for figure in figures]
            beyond = [_line(group, figure) for figure in figures if figure.is_held is False]
            require(not beyond, "; ".join(beyond))
            return _line(group, figures[-1])

        self.run(group, name, check)

    def learned(self, what: str, value: str) -> None:
        self._machine[what] = value
        self._say(f"{what}: {value}")

    def finish(self) -> bool:
        self._say("", "Figures of a fake GPU, which say nothing of any GPU:" if self._is_fake else "Figures:")
        self._say(*[f"  {_line(group, figure)}" for group, figure in self.figures] or ["  none"])
        in_part = f", {self._count('PART')} rehearsed in part, as a fake goes no further" if self._is_fake else ""
        others = [each for each in self.outcomes if each.status != "PASS"]
        self._say("", f"{self._count('PASS')} checks passed, {self._count('FAIL')} failed{in_part}")
        self._say(*[f"  {each.status}  {each.name}: {each.detail}" for each in others])
        return not self._count("FAIL")

    def _count(self, status: str) -> int:
        return [outcome.status for outcome in self.outcomes].count(status)

    def _say(self, *lines: str) -> None:
        """Print lines, and write both files as they are by now."""
        text = "".join(f"{line}\n" for line in lines)
        print(text, end="", flush=True)
        self._text += text
        self._write()

    def _write(self) -> None:
        running = f"RUNNING  {self._running}\n" if self._running else ""
        (self._folder / "report.txt").write_text(self._text + running)
        figures = [{**asdict(each), "group": group, "is_held": each.is_held} for group, each in self.figures]
        content = {
            "title": self._title,
            "machine": self._machine,
            "failed": self._count("FAIL"),
            "running": self._running,
            "checks": [outcome._asdict() for outcome in self.outcomes],
            "figures_of_a_fake_gpu" if self._is_fake else "figures": figures,
        }
        (self._folder / "report.json").write_text(json.dumps(content, indent=2) + "\n")


_Prepared = TypeVar("_Prepared")


@dataclass(frozen=True)
class Amounts:
    rounds: int  # how often each case is measured
    identity_bytes: tuple[int, ...]  # from the smallest to the largest
    large_bytes: int  # of the input of everything else that is measured
    slow_rounds: int  # how often that is measured which takes tens of milliseconds
    lent_bytes: tuple[int, ...]  # of inputs that are lent, or copied
    rest_s: float  # how long models need to let go of a client's memory
    pitches: tuple[int, ...]  # in bytes, from one row of four bytes to the next


_LENT_BYTES: Final = tuple(2**power for power in range(20, 31, 2))
FULL: Final = Amounts(300, (2**10, 2**20, 2**26, 2**30), 2**28, 30, _LENT_BYTES, 6.0, (100, 65_540, 2**20, 2**31))
SMALL: Final = Amounts(3, (2**10, 2**12, 2**16), 2**16, 2, (2**12, 2**16), 0.2, (100, 65_540))


def ratio(name: str, above_ms: float, below_ms: float, unit: str, **limits: Any) -> Figure:
    return Figure(name, above_ms / below_ms, unit, f"{above_ms:.4f} ms / {below_ms:.4f} ms", **limits)


def medians_of(rounds: int, **cases: Callable[[], object]) -> dict[str, float]:
    return medians_ms(cases, range(-min(20, rounds), rounds))


def identity_medians(
    prepare: Callable[[int], AbstractContextManager[_Prepared]],
    call: Callable[[_Prepared], object],
    sizes: Iterable[int],
    rounds: int,
    **others: Callable[[], object],
) -> dict[str, float]:
    """Return what a call takes at each size, by :func:`.in_words`, and what others take, by their names."""
    with ExitStack() as stack:
        prepared = {in_words(size): partial(call, stack.enter_context(prepare(size))) for size in sizes}
        return medians_of(rounds, **others, **prepared)
