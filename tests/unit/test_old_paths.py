"""Old import paths work until version 0.4: each warns, at the line that uses it, and gives what has moved."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

MOVED = {
    "client.compat": "triton_shm_client",
    "client": "attach",
    "testing.shm_util": "shm_util",
    "model": "shared_memory_manager",
}
OLD_NAMES = [
    (old, new, name) for old, new in MOVED.items() for name in import_module(f"shm_backend_utils.compat.{new}").__all__
]


@pytest.mark.parametrize(("old", "new", "name"), OLD_NAMES, ids=[f"{old}.{name}" for old, _, name in OLD_NAMES])
def test_an_old_path_warns_and_gives_the_very_same_object(old: str, new: str, name: str) -> None:
    home = f"shm_backend_utils.compat.{new}"
    names: dict[str, object] = {}
    told = f"shm_backend_utils.{old}.{name} has moved: import it from {home}; the old path goes with version 0.4"
    with pytest.warns(DeprecationWarning, match=f"^{told}$") as warned:
        exec(compile(f"from shm_backend_utils.{old} import {name}", "model.py", "exec"), names)
    assert names[name] is getattr(import_module(home), name)
    assert {each.filename for each in warned} == {"model.py"}


@pytest.mark.parametrize("old", MOVED)
def test_another_name_is_no_attribute(old: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'shm_backend_utils.{old}' has no attribute 'nonsense'$"):
        _ = import_module(f"shm_backend_utils.{old}").nonsense


@pytest.mark.parametrize("old", ["client.compat", "testing.shm_util"])
def test_all_names_of_an_old_module_can_be_imported_at_once(old: str) -> None:
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match="has moved"):
        exec(f"from shm_backend_utils.{old} import *", names)
    assert {*import_module(f"shm_backend_utils.compat.{MOVED[old]}").__all__} <= names.keys()


def test_the_manager_needs_no_tritonclient_at_its_old_path() -> None:
    program = "import sys; sys.modules['tritonclient'] = None; from shm_backend_utils.model import SharedMemoryManager"
    subprocess.run([sys.executable, "-c", program], check=True)
