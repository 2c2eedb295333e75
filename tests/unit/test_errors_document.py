"""docs/errors.md tells of every exception that a user can catch, and of no other; what docstrings name is public."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils import errors
from shm_backend_utils.client import errors as client_errors
from shm_backend_utils.errors import ShmError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in DOCUMENT.splitlines() if row.startswith("| `")]
RAISES = re.compile(r"^Raises\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", re.DOTALL | re.MULTILINE)
HALVES = [importlib.import_module(f"shm_backend_utils.{half}") for half in ("client", "model")]


def shared_by_both_halves() -> dict[str, type[ShmError]]:
    return {name: getattr(errors, name) for name in errors.__all__}


def of_the_client() -> dict[str, type[ShmError]]:
    found = {name: getattr(client_errors, name) for name in client_errors.__all__ if name.endswith("Error")}
    return {name: kind for name, kind in found.items() if kind.__module__ == client_errors.__name__}


def docstrings(module: Any) -> Iterator[tuple[str, str]]:
    """Yield what the public names of a module, and their public members, say of themselves."""
    for name in module.__all__:
        thing = getattr(module, name)
        yield name, inspect.getdoc(thing) or ""
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for member in dir(thing):
                if not member.startswith("_"):
                    yield f"{name}.{member}", inspect.getdoc(getattr(thing, member)) or ""


def raised_as(docstring: str) -> list[str]:
    section = RAISES.search(docstring)
    lines = [] if section is None else [line for line in section[1].splitlines() if line and not line.startswith(" ")]
    return [name.strip() for line in lines for name in line.split(",")]


def test_every_error_has_one_row_and_no_row_is_of_another() -> None:
    names = [row[0].strip("`") for row in ROWS]
    assert sorted(names) == sorted(shared_by_both_halves() | of_the_client())


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip("`") for row in ROWS])
def test_a_row_has_the_errors_code_and_says_when_and_what_to_do(row: list[str]) -> None:
    name, code, *said = row
    kind = shared_by_both_halves().get(name.strip("`"))
    assert code == ("\N{EN DASH}" if kind is None else f"`{kind.code}`")
    assert len(said) == 3
    assert all(said)


ALSO = [(row[0].strip("`"), other) for row in ROWS for other in re.findall(r"also an? `(\w+)`", row[2])]


@pytest.mark.parametrize(("name", "other"), ALSO)
def test_an_error_is_also_what_its_row_says(name: str, other: str) -> None:
    kinds = {**shared_by_both_halves(), **of_the_client(), "InferenceServerException": InferenceServerException}
    assert issubclass(kinds[name], kinds.get(other) or getattr(builtins, other))


def test_every_error_that_a_row_sends_to_is_there() -> None:
    known = {*shared_by_both_halves(), *of_the_client(), "OptionError", "InferShmError"}
    named = {name for name in re.findall(r"`(\w+Error)`", DOCUMENT) if not hasattr(builtins, name)}
    assert named <= known


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_what_a_docstring_says_is_raised_can_be_imported_beside_it(half: Any) -> None:
    named = {(where, name) for where, said in docstrings(half) for name in raised_as(said)}
    assert named
    assert [(where, name) for where, name in named if not hasattr(builtins, name) and name not in half.__all__] == []


def test_every_error_of_the_client_half_can_be_imported_from_it() -> None:
    assert {*client_errors.__all__} - {*HALVES[0].__all__} == {"deadline_exceeded", "translated", "unavailable"}
    assert not {*of_the_client()} - {*HALVES[0].__all__}


def test_every_test_that_the_document_names_is_there() -> None:
    there = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    assert named
    assert named <= there


def test_the_readme_leads_here() -> None:
    assert "(docs/errors.md)" in (ROOT / "README.md").read_text()
