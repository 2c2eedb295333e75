"""Count bad habits of English in documents and public docstrings; the exit status is 1 if there are any."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from typing import Final

from . import ROOT

HABITS: Final = {
    "'what' as a noun": r"\bwhat\b(?! to\b)(?![^.!?]*\?)",
    "'who' for anybody": r"(?:^|[.;:,|(] ?|\b(?:and|as|by|for|from|if|of|or|than|to) )who(?:ever)?\b(?![^.!?]*\?)",
    "'there is none'": r"\bthere (?:is|are) (?:none|nobody|nothing|no)\b|\b(?:nobody|somebody)\b",
    "'one's' and 'is told'": r"\bone's\b|\b(?:is|are|was) told\b|\bas ever\b|\blikewise\b",
    "nicknames": r"\b(?:desk|office|annex|bury|buried|forsake|patience|trial)s?\b",
    "a sentence over 35 words": r"(?:\S+ ){35}\S+",
    "a table's cell over 60 words": r"^\|(?:\S+ ){60}\S+",
}
"""Patterns in a sentence, or, if they begin with a bar, in a table's cell."""


def of_documents() -> Iterator[str]:
    """Yield each paragraph of the documents, and each cell of their tables behind a bar; code is one word."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]:
        if page.name not in ("CHANGELOG.md", "bench.md"):
            text = re.sub(r"^ *(```+).*?^ *\1$|<!--.*?-->|^:::.*?(?=^\S|\Z)", "", page.read_text(), flags=re.M | re.S)
            text = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`\n]*`", "CODE", text))
            for paragraph in re.split(r"\n\s*\n|\n(?=- |\||#|\d+\. )", text):
                cells = paragraph.strip("| ").split(" | ") if paragraph.startswith("|") else [paragraph]
                yield from (f"|{cell}" if len(cells) > 1 else cell for cell in cells)


def of_docstrings() -> Iterator[str]:
    """Yield each paragraph, but for tables, of the docstrings of names that do not begin with an underscore."""
    for file in ROOT.glob("shm_backend_utils/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = "" if getattr(node, "name", "").startswith("_") else ast.get_docstring(node) or ""
                paragraphs = re.split(r"\n\s*\n", re.sub(r"``[^`\n]*``", "CODE", text))
                yield from (each for each in paragraphs if not re.search(r"\S {2,}\S", each))


def found_in(paragraphs: list[str], pattern: str) -> list[str]:
    """Return the sentences, or cells, that have a pattern, once for each match."""
    texts = [" ".join(paragraph.split()) for paragraph in paragraphs]
    parts = texts if pattern.startswith("^") else [part for text in texts for part in re.split(r"(?<=[.!?]) ", text)]
    return [part for part in parts for _ in re.findall(pattern, part, re.IGNORECASE)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/prose", description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the sentences of the documents, too")
    shows = parser.parse_args().show
    documents, docstrings, is_bad = [*of_documents()], [*of_docstrings()], False
    for name, pattern in HABITS.items():
        here, there = found_in(documents, pattern), found_in(docstrings, pattern)
        print(f"{name:30} documents {len(here):4}  docstrings {len(there):4}")
        print("".join(f"    {sentence}\n" for sentence in here if shows), end="")
        is_bad = is_bad or bool(here or there)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
