"""The project's pages, and the blocks of code in them.

A comment before a block says what the tests do with it:

- ``<!-- file: PATH -->``: write it there, in an empty folder; what begins with ``models/`` is a model of the server's.
- ``<!-- program: PATH -->``: write it there, and run it.
- ``<!-- prints -->``: what the program before it prints.
- ``<!-- run by: TEST -->``: that test runs it.
- ``<!-- not run: REASON -->``: nothing does, and why.

``<!-- blocks run by: TEST -->`` says it of all blocks of a page that have no comment of their own.

Other blocks of Python are programs, too: those of a page run one after another, in one namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")},
    key=lambda page: (len(page.parts), page),
)

_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<mark>file|program|prints|run by|not run)(?:: (?P<said>.+?))? -->\n+)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_BY_OTHERS: Final = re.compile(r"^<!-- blocks run by: (.+) -->$", re.MULTILINE)


class Block(NamedTuple):
    """A block of code: where it begins, what it is written in, and what its comment says."""

    page: Path
    line: int
    language: str
    code: str
    mark: str | None
    said: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Yield a page's blocks, in order; those in some languages, if any are named."""
    text = page.read_text()
    others = _BY_OTHERS.search(text)
    default = (None, "") if others is None else ("run by", others[1])
    for found in _BLOCK.finditer(text):
        if not languages or found["language"] in languages:
            line = text.count("\n", 0, found.start("fence")) + 1
            mark = (found["mark"], found["said"] or "") if found["mark"] else default
            yield Block(page, line, found["language"], found["code"], *mark)
