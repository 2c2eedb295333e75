"""What is imported, where, and what that needs; what the package offers; old paths, which work with a warning."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import shm_backend_utils

PACKAGE = "shm_backend_utils"
FOLDER = Path(shm_backend_utils.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def packages_imported_by(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def files_that_import(package: str) -> set[str]:
    return {str(file.relative_to(FOLDER)) for file in FILES if package in packages_imported_by(file.read_text())}


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


COMPAT = "shm_backend_utils.compat"
OLD_MODULES = {"client.compat": "triton_shm_client", "testing.shm_util": "shm_util"}
OLD_NAMES = [
    *(
        (old, f"compat.{new}", name)
        for old, new in OLD_MODULES.items()
        for name in import_module(f"{COMPAT}.{new}").__all__
    ),
    *(("client", "compat.attach", name) for name in ("Attached", "CudaRegion", "attach")),
    *(("client", "client.explanation", name) for name in ("Check", "ClientStats", "Explanation")),
    ("client", "client.prepared", "AsyncPreparedCall"),
    ("client", "client.errors", "OutputRoomError"),
    *(
        ("model", "compat.shared_memory_manager", name)
        for name in ("MemoryInfo", "RegionStatus", "SharedMemoryManager")
    ),
    ("model", "tensors.view", "StringsView"),
    *((half, "gpu.errors", "CudaError") for half in ("client", "model")),
    *((half, "errors", "TensorShapeError") for half in ("client", "model")),
    *((half, "gpu.arrays.device_array", "DeviceArray") for half in ("", "client", "model")),
    *((half, "gpu.arrays.device_view", "DeviceView") for half in ("", "model")),
    ("", "client.explanation", "Explanation"),
]


@pytest.mark.parametrize(("old", "new", "name"), OLD_NAMES, ids=[f"{old}.{name}" for old, _, name in OLD_NAMES])
def test_an_old_path_warns_and_gives_the_very_same_object(old: str, new: str, name: str) -> None:
    path, home = f"shm_backend_utils.{old}".rstrip("."), f"shm_backend_utils.{new}"
    names: dict[str, object] = {}
    told = re.escape(f"{path}.{name} has moved: import it from {home}")
    with pytest.warns(DeprecationWarning, match=f"^{told}$") as warned:
        exec(compile(f"from {path} import {name}", "model.py", "exec"), names)
    assert names[name] is getattr(import_module(home), name)
    assert {each.filename for each in warned} == {"model.py"}


@pytest.mark.parametrize("old", [*OLD_MODULES, "client", "model"])
def test_another_name_is_no_attribute(old: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'shm_backend_utils.{old}' has no attribute 'nonsense'$"):
        _ = import_module(f"shm_backend_utils.{old}").nonsense


@pytest.mark.parametrize(("old", "new"), OLD_MODULES.items())
def test_all_names_of_an_old_module_can_be_imported_at_once(old: str, new: str) -> None:
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="has moved"):
        exec(f"from shm_backend_utils.{old} import *", names)
    assert {*import_module(f"{COMPAT}.{new}").__all__} <= names.keys()


HALVES = ("client", "model", "errors", "tensors.view")


def test_a_public_name_is_the_same_wherever_it_is_to_be_had() -> None:
    for name in {*shm_backend_utils.__all__} - {"__version__"}:
        known = getattr(shm_backend_utils, name)
        homes = [vars(import_module(f"shm_backend_utils.{half}")).get(name) for half in HALVES]
        assert {id(each) for each in homes if each is not None} == {id(known)}, name


@pytest.mark.parametrize("name", ["", ".client", ".model"])
def test_what_is_shown_is_what_is_public(name: str) -> None:
    module = import_module(f"shm_backend_utils{name}")
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("half", ["client", "model", "errors"])
def test_every_public_name_of_a_half_is_there(half: str) -> None:
    module = import_module(f"shm_backend_utils.{half}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert sorted(set(module.__all__)) == sorted(module.__all__)


def test_names_of_the_model_half_need_no_client_nor_does_the_manager_at_its_old_path() -> None:
    names = "ShmError, ShmSession, Call, TensorView; from shm_backend_utils.model import SharedMemoryManager"
    program = f"import sys; sys.modules['tritonclient'] = None; from shm_backend_utils import {names}"
    subprocess.run([sys.executable, "-c", program], check=True)
