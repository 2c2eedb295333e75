"""What is imported, where, and what that needs; what the package offers; old paths, which work with a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import shm_backend_utils

PACKAGE = "shm_backend_utils"
FOLDER = Path(shm_backend_utils.__file__).parent


def files_that_import(package: str) -> set[str]:
    statement = re.compile(rf"^ *(?:import|from) {package}\b", re.MULTILINE)
    return {str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.py") if statement.search(file.read_text())}


def loaded_by(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("missing", [[], ["ml_dtypes"]], ids=str)
def test_importing_the_model_half_loads_only_numpy_and_the_standard_library(missing: list[str]) -> None:
    modules = ["errors", "model_spec", "tensors.dlpack", "tensors.view", "memory.managed", "protocol.table", "model"]
    loaded = loaded_by(
        f"import sys, numpy; sys.modules.update(dict.fromkeys({missing})); before = set(sys.modules); "
        f"import {', '.join(f'{PACKAGE}.{module}' for module in modules)}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(loaded) - sys.stdlib_module_names <= {"numpy", "ml_dtypes", PACKAGE} - set(missing)
    assert PACKAGE in loaded


def test_importing_the_package_loads_nothing_of_it() -> None:
    assert loaded_by(f"import sys, {PACKAGE}; print(*[x for x in sys.modules if x.startswith('{PACKAGE}.')])") == []


def test_only_these_parts_import_tritons_backend_and_tritonclient() -> None:
    assert files_that_import("triton_python_backend_utils") == {"model/triton.py"}
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


@pytest.mark.parametrize("old", ["", *OLD_MODULES, "client", "model"])
def test_another_name_is_no_attribute(old: str) -> None:
    path = f"shm_backend_utils.{old}".rstrip(".")
    with pytest.raises(AttributeError, match=f"^module '{path}' has no attribute 'nonsense'"):
        _ = import_module(path).nonsense


@pytest.mark.parametrize(("old", "new"), OLD_MODULES.items())
def test_all_names_of_an_old_module_can_be_imported_at_once(old: str, new: str) -> None:
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="has moved"):
        exec(f"from shm_backend_utils.{old} import *", names)
    assert {*import_module(f"{COMPAT}.{new}").__all__} <= names.keys()


def test_a_public_name_is_the_same_wherever_it_is_to_be_had() -> None:
    halves = [
        vars(import_module(f"shm_backend_utils.{half}")) for half in ("client", "model", "errors", "tensors.view")
    ]
    for name in {*shm_backend_utils.__all__} - {"__version__"}:
        homes = {id(half[name]) for half in halves if half.get(name) is not None}
        assert homes == {id(getattr(shm_backend_utils, name))}, name


@pytest.mark.parametrize("name", ["", ".client", ".model", ".errors"])
def test_what_is_shown_is_what_is_public_and_all_of_it_is_there(name: str) -> None:
    module = import_module(f"shm_backend_utils{name}")
    assert [each for each in module.__all__ if not hasattr(module, each)] == []
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert name == ".errors" or dir(module) == sorted(module.__all__)


def test_names_of_the_model_half_need_no_client_nor_does_the_manager_at_its_old_path() -> None:
    names = "ShmError, ShmSession, Call, TensorView; from shm_backend_utils.model import SharedMemoryManager"
    program = f"import sys; sys.modules['tritonclient'] = None; from shm_backend_utils import {names}"
    subprocess.run([sys.executable, "-c", program], check=True)
