"""What hostile clients did to honest ones, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from .attacks import ATTACKS

__all__ = ["MOST_RATIO", "Answer", "HostileReport", "Turn"]

MOST_RATIO: Final = 3.0
"""How much longer than alone the slowest of a hundred honest requests may take."""


class Answer(NamedTuple):
    """One honest request."""

    kind: str
    began: float
    took_s: float
    error: str


class Turn(NamedTuple):
    """A time in which one attacker was at work, until what died of it was brought back."""

    name: str
    began: float
    ended: float
    died: tuple[str, ...]
    may_kill: bool = False


class Figures(NamedTuple):
    """Of the honest requests that began in some turns. Times are of those that were answered rightly."""

    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Figures:
        """Work them out; of no request, all is 0."""
        times = [answer.took_s for answer in answers if not answer.error]
        took = np.array(times or [0.0]) * 1e3
        middle, slow = np.percentile(took, [50, 99])
        return cls(len(answers), len(answers) - len(times), float(middle), float(slow), float(took.max()))


@dataclass(frozen=True)
class HostileReport:
    """What was found.

    Attributes
    ----------
    alone : Turn
    turns : list of Turn
    answers : list of Answer
    words : mapping of str to Counter of str
        How the server answered each attacker.
    """

    seed: int
    seconds: float
    alone: Turn
    turns: list[Turn]
    answers: list[Answer]
    words: Mapping[str, Counter[str]]

    def figures(self, name: str, kind: str = "request") -> Figures:
        """Return those of one attack, or alone."""
        turns = [turn for turn in (self.alone, *self.turns) if turn.name == name]
        return Figures.of(self._within(turns, kind))

    @property
    def all_attacks(self) -> Figures:
        """Those of all attacks, but of those that may kill."""
        return Figures.of(self._within([turn for turn in self.turns if not turn.may_kill], "request"))

    @property
    def ratio(self) -> float:
        """The honest clients' p99 beside the hostile ones, over theirs alone."""
        return self.all_attacks.p99_ms / max(self.figures("alone").p99_ms, 1e-6)

    @property
    def deaths(self) -> dict[str, int]:
        """What died, by the attack."""
        return dict(Counter(turn.name for turn in self.turns for _ in turn.died))

    @property
    def failures(self) -> dict[str, int]:
        """What must be zero."""
        may_kill = {turn.name for turn in self.turns if turn.may_kill}
        return {
            "honest requests that failed": self.all_attacks.failed,
            "deaths": sum(count for name, count in self.deaths.items() if name not in may_kill),
            f"p99 above {MOST_RATIO:g} times that alone": int(self.ratio > MOST_RATIO),
        }

    @property
    def is_good(self) -> bool:
        """Whether nothing was found that must not be."""
        return not any(self.failures.values())

    def as_json(self) -> dict[str, Any]:
        """Return the whole report."""
        names = ["alone", *self.words]
        errors = Counter(
            (turn.name, answer.error)
            for turn in self.turns
            for answer in self.answers
            if answer.error and turn.began <= answer.began < turn.ended
        )
        return {
            "good": self.is_good,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
            "ratio": round(self.ratio, 2),
            "all_attacks": self.all_attacks._asdict(),
            "requests": {name: self.figures(name)._asdict() for name in names},
            "streams": {name: self.figures(name, "stream")._asdict() for name in names},
            "deaths": self.deaths,
            "pauses_s": {kind.name: kind.pause_s for kind in ATTACKS if kind.name in self.words},
            "attackers_were_answered": {name: dict(words.most_common()) for name, words in self.words.items()},
            "errors": {f"{name}: {error}": count for (name, error), count in errors.most_common()},
        }

    def show(self, console: Console) -> None:
        """Print the tables."""
        report = self.as_json()
        title = f"honest clients beside hostile ones: {self.seconds:.0f} s, seed {self.seed}"
        table = Table(
            "attack", "requests", "failed", "p50 ms", "p99 ms", "worst ms", "streams p99", "died", title=title
        )
        for name in report["requests"]:
            self._row(table, name, self.figures(name), f"{self.figures(name, 'stream').p99_ms:.0f}", name)
        self._row(table, "all that must not kill", self.all_attacks, "", "")
        console.print(table)
        console.print(f"p99 beside hostile clients, over p99 alone: {self.ratio:.2f}, at most {MOST_RATIO:g}")
        for name, words in report["attackers_were_answered"].items():
            console.print(f"{name}: {', '.join(f'{count} × {word}' for word, count in words.items()) or 'nothing'}")
        for error, count in report["errors"].items():
            console.print(f"{count} × {error}")
        for name, count in self.failures.items():
            console.print(f"[{'red' if count else 'green'}]{name}: {count}[/]")

    def _row(self, table: Table, name: str, found: Figures, streams: str, attack: str) -> None:
        times = [f"{each:.1f}" for each in (found.p50_ms, found.p99_ms, found.worst_ms)]
        table.add_row(name, str(found.requests), str(found.failed), *times, streams, str(self.deaths.get(attack, 0)))

    def _within(self, turns: Sequence[Turn], kind: str) -> list[Answer]:
        return [
            answer
            for answer in self.answers
            if answer.kind == kind and any(turn.began <= answer.began < turn.ended for turn in turns)
        ]
