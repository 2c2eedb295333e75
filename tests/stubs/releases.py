"""Which server brought a name, as the docstrings of the stubs say."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from .declared import Declaration

__all__ = ["Release", "release_of", "releases_of_parameters"]

WHOLE: Final = re.compile(r"From Triton (\d\d\.\d\d) \((\d+)\.(\d+)\) on\b")
PARAMETERS: Final = re.compile(r"Parameters\n-+\n(.*?)(?=\n\n\w|\Z)", re.DOTALL)
PARAMETER: Final = re.compile(r"^(\w+(?:, \w+)*)\n((?:    .*(?:\n|\Z))+)", re.MULTILINE)


class Release(NamedTuple):
    """A server's version."""

    major: int
    minor: int


def release_of(name: str, declared: dict[str, Declaration]) -> Release:
    """Return the first server that has a name, as its docstring or that of its class says; 2.0 where nothing does."""
    while name:
        match = WHOLE.match(declared[name].docstring or "")
        if match is not None:
            return Release(int(match[2]), int(match[3]))
        name = name.rpartition(".")[0]
    return Release(2, 0)


def releases_of_parameters(name: str, declared: dict[str, Declaration]) -> dict[str, Release]:
    """Return the first server that has a parameter, where a docstring says; that of a class is its ``__init__``'s."""
    docstring = declared[name.removesuffix(".__init__")].docstring or ""
    section = PARAMETERS.search(docstring)
    found: dict[str, Release] = {}
    for names, text in PARAMETER.findall(section[1] if section is not None else ""):
        match = WHOLE.search(" ".join(text.split()))
        if match is not None:
            found |= dict.fromkeys(names.split(", "), Release(int(match[2]), int(match[3])))
    return found
