"""Imports go downward only, and the half that runs inside Triton needs numpy and the standard library alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shm_backend_utils

PACKAGE = "shm_backend_utils"
FOLDER = Path(shm_backend_utils.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
every_module = pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(FOLDER)) for file in FILES])


def imports(source: str, package: str) -> set[str]:
    """Return the full names of all modules that a module of this package imports, wherever in its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def imports_of(file: Path) -> set[str]:
    return imports(file.read_text(), ".".join([PACKAGE, *file.relative_to(FOLDER).parts[:-1]]))


def part_of(file: Path) -> str:
    """Return the part of the package that a file belongs to: a folder's name, or nothing for the top level."""
    parts = file.relative_to(FOLDER).parts
    return parts[0] if len(parts) > 1 else ""


def imported_parts(file: Path) -> set[str]:
    """Return the parts of the package that a file imports."""
    names = [name.split(".") for name in imports_of(file)]
    return {name[1] for name in names if name[0] == PACKAGE and len(name) > 1}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import a.b", "a.b"),
        ("from a import b", "a.b"),
        ("from a.b import c", "a.b"),
        ("from . import x", "shm_backend_utils.model.x"),
        ("from .x import y", "shm_backend_utils.model.x"),
        ("from .. import client", "shm_backend_utils.client"),
        ("from ..client.pool import Pool", "shm_backend_utils.client.pool"),
        ("def f():\n    if True:\n        import a", "a"),
    ],
)
def test_every_form_of_import_is_seen(source: str, module: str) -> None:
    assert module in imports(source, "shm_backend_utils.model")


@pytest.mark.parametrize(
    "module",
    ["model", "protocol.table", "memory.managed", "tensors.view", "tensors.dlpack", "model_spec", "errors"],
)
@pytest.mark.parametrize("missing", [[], ["ml_dtypes"]], ids=["all there", "without ml_dtypes"])
def test_importing_it_loads_only_numpy_and_the_standard_library(module: str, missing: list[str]) -> None:
    program = (
        f"import sys, numpy; sys.modules.update(dict.fromkeys({missing})); before = set(sys.modules); "
        f"import {PACKAGE}.{module}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - sys.stdlib_module_names <= {"numpy", "ml_dtypes", PACKAGE} - set(missing)
    assert PACKAGE in loaded


def test_importing_the_package_loads_nothing_of_it() -> None:
    program = f"import sys, {PACKAGE}; print(*[name for name in sys.modules if name.startswith('{PACKAGE}.')])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


@pytest.mark.parametrize("name", sorted(set(shm_backend_utils.__all__)))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(shm_backend_utils, name) is not None


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'shm_backend_utils' has no attribute 'nonsense'"):
        shm_backend_utils.nonsense  # noqa: B018


@every_module
def test_only_the_model_half_imports_tritons_backend(file: Path) -> None:
    assert part_of(file) == "model" or "triton_python_backend_utils" not in imports_of(file)


@every_module
def test_only_the_client_half_and_testing_import_tritonclient(file: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(file)}
    assert part_of(file) in {"client", "testing"} or "tritonclient" not in tops


FORBIDDEN = {
    "": {"model", "client", "server", "memory", "tensors", "protocol"},
    "protocol": {"model", "client", "server", "memory", "tensors"},
    "memory": {"model", "client", "server"},
    "tensors": {"model", "client", "server"},
    "model": {"client", "server"},
    "client": {"model", "server"},
    "server": {"model", "client", "memory", "tensors", "protocol"},
}


@every_module
def test_imports_go_downward_only(file: Path) -> None:
    assert imported_parts(file) & FORBIDDEN.get(part_of(file), set()) == set()


@pytest.mark.parametrize("part", sorted(FORBIDDEN))
def test_every_part_that_the_rule_speaks_of_exists(part: str) -> None:
    assert part in {part_of(file) for file in FILES}
