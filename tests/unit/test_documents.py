"""What documents and lists say of the library is so: dependencies, errors, pictures, tests and mutants."""

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

from scripts.tools.bench.pictures import PICTURES
from scripts.tools.mutants.__main__ import EQUIVALENT, mutants_of, named_in
from shm_backend_utils import errors
from shm_backend_utils.client import errors as client_errors
from shm_backend_utils.errors import ShmError
from shm_backend_utils.gpu import errors as gpu_errors

ROOT = Path(__file__).resolve().parents[2]
TESTS = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


def test_each_test_that_the_design_names_is_there_and_each_threat_has_one() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", design))
    assert named
    assert named - TESTS == set()
    table = design.partition("| threat | effect | test |\n")[2]
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].splitlines()[1:]]
    assert [row for row in rows if not row[0].startswith("**") and (len(row) != 3 or "`test_" not in row[2])] == []


def test_every_change_that_is_listed_as_equivalent_can_still_be_made() -> None:
    assert named_in(EQUIVALENT) - {mutant.name for mutant in mutants_of([])} == set()


REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*])?(.*)$")


def declared() -> dict[str, tuple[str, set[str]]]:
    text = (ROOT / "pyproject.toml").read_text()
    found: dict[str, tuple[str, set[str]]] = {}
    required = next(line for line in text.splitlines() if line.startswith("dependencies = "))
    extra = ""
    for line in [required, *text.split("[project.optional-dependencies]")[1].split("\n[")[0].splitlines()]:
        begin = re.match(r"(\w+) = \[", line)
        extra = begin[1] if begin else extra
        for entry in re.findall(r'"([^"]+)"', line.partition("#")[0]):
            match = REQUIREMENT.match(entry)
            assert match is not None, entry
            if match[1] != "triton-shm-backend-utils":
                found.setdefault(match[1], (match[2], set()))[1].update({extra} - {"dependencies"})
    return found


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the rows of the table that have a licence and a reason."""
    rows = {}
    text = (ROOT / "docs" / "installing.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "package":
            name, versions, extras, licence, reason = cells
            assert all((licence, reason)), name
            rows[name] = (versions, {extra for extra in extras.split(", ") if extra})
    return rows


def test_every_dependency_has_its_row_and_no_other() -> None:
    assert documented() == declared()


def images_of(document: Path) -> list[str]:
    """Return the addresses of a document's images, in Markdown or HTML, but those of other hosts."""
    found = re.findall(
        r"!\[[^\]]*\]\(([^)\s]+)|<img\b[^>]*\bsrc=\"([^\"]+)|<source\b[^>]*\bsrcset=\"([^\"]+)", document.read_text()
    )
    return [address for groups in found for address in groups if address and "://" not in address]


def test_the_numbers_show_every_picture_of_the_bench_which_is_there() -> None:
    assert images_of(ROOT / "docs" / "bench.md") == [f"images/{name}.svg" for name in PICTURES]
    assert {f"{name}.svg" for name in PICTURES} <= {file.name for file in (ROOT / "docs" / "images").iterdir()}


ERRORS = (ROOT / "docs" / "errors.md").read_text()
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in ERRORS.splitlines() if row.startswith("| `")]
RAISES = re.compile(r"^Raises\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", re.DOTALL | re.MULTILINE)
HALVES = [importlib.import_module(f"shm_backend_utils.{half}") for half in ("client", "model")]


SHARED: dict[str, type[ShmError]] = {name: getattr(errors, name) for name in errors.__all__}
OF_THE_CLIENT: dict[str, type[ShmError]] = {
    name: kind
    for name, kind in vars(client_errors).items()
    if name in client_errors.__all__ and name.endswith("Error") and kind.__module__ == client_errors.__name__
}


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
    assert sorted(row[0].strip("`") for row in ROWS) == sorted(SHARED | OF_THE_CLIENT)
    known = {*SHARED, *OF_THE_CLIENT, "OptionError", "InferShmError"}
    named = {name for name in re.findall(r"`(\w+Error)`", ERRORS) if not hasattr(builtins, name)}
    assert named <= known, "to which a row sends"


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip("`") for row in ROWS])
def test_a_row_has_the_errors_code_and_kinds_and_says_when_and_what_to_do(row: list[str]) -> None:
    name, code, *said = row[0].strip("`"), *row[1:]
    kinds = {**SHARED, **OF_THE_CLIENT, "InferenceServerException": InferenceServerException}
    assert code == (f"`{SHARED[name].code}`" if name in SHARED else "\N{EN DASH}")
    assert len(said) == 3
    assert all(said)
    for also in re.findall(r"also an? `(\w+)`", said[0]):
        assert issubclass(kinds[name], kinds.get(also) or getattr(builtins, also))


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_what_a_docstring_says_is_raised_is_exported_by_its_half_or_by_a_module_of_errors(half: Any) -> None:
    named = {(where, name) for where, said in docstrings(half) for name in raised_as(said)}
    assert named
    exported = {*dir(builtins), *half.__all__, *errors.__all__, *client_errors.__all__, *gpu_errors.__all__}
    assert [(where, name) for where, name in named if name not in exported] == []
