"""What the doctor can find: each trouble has a code and one remedy, and a finding says where it was met."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "Trouble"]


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong in practice. The page ``docs/troubleshooting.md`` has all of them."""

    code: str  # in lower case with hyphens, as no-shm-input; the same from version to version
    what: str  # what is wrong, in one sentence, for somebody who meets it for the first time
    remedy: str  # what to do, in one sentence or two; the same wherever it is met; figures and names are the finding's
    # Requests fail, or are slower than they need be, until it is mended. Else it is a piece of advice: the exit status
    # stays 0.
    is_fatal: bool = True


@dataclass(frozen=True)
class Finding:
    """A trouble that was met."""

    trouble: Trouble
    found: str  # what was found, and what was expected: one line with the names and figures
    model: str = ""  # empty if it is the server's or the machine's
