"""What is imported, where, and what that needs: all that import-linter's contracts in pyproject.toml cannot say."""

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


def packages_imported_by(source: str) -> set[str]:
    """Return the top-level packages that a module imports, wherever in its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def files_that_import(package: str) -> set[str]:
    return {str(file.relative_to(FOLDER)) for file in FILES if package in packages_imported_by(file.read_text())}


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import a.b", {"a"}),
        ("import a as b, c", {"a", "c"}),
        ("from a.b import c", {"a"}),
        ("from . import a", set()),
        ("from ..a import b", set()),
        ("def f():\n    if True:\n        import a", {"a"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, packages: set[str]) -> None:
    assert packages_imported_by(source) == packages


@pytest.mark.parametrize("missing", [[], ["ml_dtypes"]], ids=["all there", "without ml_dtypes"])
def test_importing_the_model_half_loads_only_numpy_and_the_standard_library(missing: list[str]) -> None:
    modules = ["errors", "model_spec", "tensors.dlpack", "tensors.view", "memory.managed", "protocol.table", "model"]
    program = (
        f"import sys, numpy; sys.modules.update(dict.fromkeys({missing})); before = set(sys.modules); "
        f"import {', '.join(f'{PACKAGE}.{module}' for module in modules)}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - sys.stdlib_module_names <= {"numpy", "ml_dtypes", PACKAGE} - set(missing)
    assert PACKAGE in loaded


def test_importing_the_package_loads_nothing_of_it() -> None:
    program = f"import sys, {PACKAGE}; print(*[name for name in sys.modules if name.startswith('{PACKAGE}.')])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'shm_backend_utils' has no attribute 'nonsense'"):
        shm_backend_utils.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_only_one_module_imports_tritons_backend() -> None:
    assert files_that_import("triton_python_backend_utils") == {"model/triton.py"}


def test_only_these_parts_import_tritonclient() -> None:
    parts = {file.partition("/")[0] for file in files_that_import("tritonclient")}
    assert parts == {"cli", "client", "compat", "repository", "testing"}
