"""What a run of the doctor prints: lines for people, or one JSON object."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from ..wording import printable
from .checkup import Checkup
from .findings import Finding

__all__ = ["as_json", "as_text"]

_LONGEST: Final = 1000
_MARKS: Final = {True: "✗", False: "!"}


def as_json(checkup: Checkup, subject: str) -> str:
    """Return one line of JSON: ``subject``, ``healthy``, ``fine`` and ``findings``."""
    said: dict[str, Any] = {
        "subject": subject,
        "healthy": checkup.exit_status == 0,
        "fine": [{"model": model, "what": line} for model, line in checkup.fine],
        "findings": [
            {
                "code": finding.trouble.code,
                "model": finding.model,
                "fatal": finding.trouble.is_fatal,
                "what": finding.trouble.what,
                "found": finding.found,
                "remedy": finding.trouble.remedy,
            }
            for finding in checkup.findings
        ],
    }
    return json.dumps(said)


def as_text(checkup: Checkup) -> str:
    """Return what was found as lines: of the server and the machine first, then of each model."""
    told: defaultdict[str, list[str]] = defaultdict(list)
    for model, line in checkup.fine:
        told[model].append(f"✓ {_one_line(line)}")
    for finding in checkup.findings:
        told[finding.model] += _told(finding)
    lines: list[str] = []
    for model, said in sorted(told.items()):
        lines += [f"model {_one_line(model)}"] if model else []
        lines += [f"{'  ' if model else ''}{line}" for line in said]
    fatal = sum(finding.trouble.is_fatal for finding in checkup.findings)
    advice = len(checkup.findings) - fatal
    lines.append(f"{_count(fatal, 'trouble')}, {_count(advice, 'piece')} of advice")
    return "\n".join(lines)


def _told(finding: Finding) -> Iterator[str]:
    trouble = finding.trouble
    yield f"{_MARKS[trouble.is_fatal]} {trouble.code}: {trouble.what}"
    yield f"    found:  {_one_line(finding.found)}"
    yield f"    remedy: {trouble.remedy}"


def _one_line(text: str) -> str:
    """Return a text of a server's as one line, not too long, without what a terminal would obey."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
