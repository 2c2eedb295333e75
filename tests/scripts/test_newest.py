"""Where ``scripts/test --newest`` finds a server that no wheel carries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.tools.test.runs import VARIABLE, find_newest
from shm_backend_utils.errors import MachineError
from shm_backend_utils.server.installation import PYTHON, Installation

STUB = Path("backends/python/triton_python_backend_stub")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where servers may lie; what is unpacked lies beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "servers"
    folder.mkdir()
    (folder / "README.md").write_text("of Triton 99")
    return folder


def make_server(folder: Path) -> Path:
    for name in ("bin/tritonserver", str(STUB), f"stubs/3.99/{STUB.name}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def archive(folder: Path) -> Path:
    packed = folder.with_name(f"{folder.name}.tar.xz")
    subprocess.run(["tar", "-cJf", packed, "-C", folder.parent, folder.name], check=True)
    return packed


def test_where_there_is_none_none_is_found(beside: Path) -> None:
    assert find_newest(None, {}, beside) is None
    assert find_newest(None, {}, beside / "nowhere") is None


def test_the_newest_of_several_is_found(beside: Path) -> None:
    servers = [make_server(beside / f"triton-2.{minor}") for minor in (9, 100, 73)]
    assert find_newest(None, {}, beside) == servers[1]


def test_the_one_that_is_named_comes_first(beside: Path, tmp_path: Path) -> None:
    make_server(beside / "triton-2.100")
    named = make_server(tmp_path / "mine")
    assert find_newest(None, {VARIABLE: str(named)}, beside) == named


def test_one_that_is_named_and_not_there_is_an_error(beside: Path) -> None:
    with pytest.raises(MachineError, match=f"{VARIABLE} names /nowhere, which is not there"):
        find_newest(None, {VARIABLE: "/nowhere"}, beside)


def test_an_archive_is_unpacked_once(beside: Path, tmp_path: Path) -> None:
    archive(make_server(tmp_path / "triton-2.73"))
    packed = beside / "triton-2.73.tar.xz"
    (tmp_path / packed.name).rename(packed)
    folder = find_newest(None, {}, beside)
    assert folder is not None
    assert folder.name.endswith(f"-py{PYTHON}")
    assert Installation(folder).is_complete
    (folder / "mark").touch()
    assert find_newest(None, {}, beside) == folder
    assert (folder / "mark").exists()


def test_of_the_stubs_in_an_archive_the_one_for_the_python_is_taken(beside: Path, tmp_path: Path) -> None:
    packed = archive(make_server(tmp_path / "triton-2.73"))
    stubs = [find_newest(python, {VARIABLE: str(packed)}, beside) for python in (None, "3.99")]
    assert [(folder / STUB).read_text() for folder in stubs if folder] == [str(STUB), f"stubs/3.99/{STUB.name}"]


def test_an_archive_of_something_else_is_an_error(beside: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(MachineError, match="holds no server: it has no bin/tritonserver"):
        find_newest(None, {VARIABLE: str(archive(tmp_path / "other"))}, beside)
    (beside / "broken.tar.xz").write_text("?")
    with pytest.raises(MachineError, match=r"broken\.tar\.xz holds no server: "):
        find_newest(None, {}, beside)
