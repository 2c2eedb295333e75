"""What the doctor can find: each trouble has a code and one remedy, and a finding says where it was met."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "Trouble"]


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong in practice. The page ``docs/troubleshooting.md`` has all of them.

    Attributes
    ----------
    code : str
        Its name in lower case with hyphens, as ``no-shm-input``. It stays the same from version to version.
    what : str
        What is wrong, in one sentence, for somebody who meets it for the first time.
    remedy : str
        What to do, in one sentence or two. The same wherever it is met; figures and names are the finding's.
    is_fatal : bool
        Whether requests fail, or are slower than they need be, until it is mended; else it is a piece of advice, and
        the exit status stays 0.
    """

    code: str
    what: str
    remedy: str
    is_fatal: bool = True


@dataclass(frozen=True)
class Finding:
    """A trouble that was met.

    Attributes
    ----------
    trouble : Trouble
    found : str
        What was found, and what was expected: one line with the names and figures.
    model : str
        The model that has it; empty if it is the server's or the machine's.
    """

    trouble: Trouble
    found: str
    model: str = ""
