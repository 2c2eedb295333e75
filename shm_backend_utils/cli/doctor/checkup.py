"""A run of the doctor: its findings, its good news, and its time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from .troubles import Trouble

__all__ = ["Checkup", "Finding"]

TIME_S: Final = 3.5  # for all questions to the server, so that the command ends within five


@dataclass(frozen=True)
class Finding:
    """A trouble that was met."""

    trouble: Trouble
    found: str  # the finding, and the expectation: one line with the names and figures
    model: str = ""  # empty if it is the server's or the machine's


@dataclass
class Checkup:
    """The results of the checks so far."""

    # The checks that passed: the model's name, or none, and one line.
    fine: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    deadline: float = math.inf  # by time.monotonic(); the server is asked nothing after it

    def start_time(self) -> None:
        """Start the time for questions to the server."""
        self.deadline = time.monotonic() + TIME_S

    def add_fine(self, line: str, model: str = "") -> None:
        """Take note of something that is as it should be."""
        self.fine.append((model, line))

    def add(self, trouble: Trouble, found: str, model: str = "") -> None:
        """Take note of a finding."""
        self.findings.append(Finding(trouble, found, model))

    def conclude(self, findings: Iterable[Finding], otherwise: str, model: str = "") -> None:
        """Take note of the findings, or, without any, that this part is fine."""
        found = list(findings)
        self.findings += found
        if not found:
            self.add_fine(otherwise, model)

    def until(self, most_s: float) -> float:
        """Return the deadline of one question, by ``time.monotonic()``."""
        return min(self.deadline, time.monotonic() + most_s)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    @property
    def exit_status(self) -> int:
        """0 if nothing fatal was found, else 1."""
        return int(any(finding.trouble.is_fatal for finding in self.findings))
