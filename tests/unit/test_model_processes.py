"""Which processes are a model's, where names of models and of their instances meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from shm_backend_utils.client import model_processes

STUB = "/opt/tritonserver/backends/python/triton_python_backend_stub"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/proc`` with a server that listens at port 8001."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("names\n 0: 00000000:1F41 00000000:0000 0A 0:0 0:0 0 0 0 777 1\n")
    begin(tmp_path, 10, 1, "/opt/tritonserver")
    (tmp_path / "10/fd").mkdir()
    (tmp_path / "10/fd/3").symlink_to("socket:[777]")
    monkeypatch.setattr(model_processes, "_PROC", tmp_path)
    return tmp_path


def begin(proc: Path, pid: int, parent: int, *words: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) S {parent} 0 0")


@pytest.mark.parametrize(
    ("stubs", "living"),
    [
        ([("/models/a/1", "a_0_0"), ("/models/a/1", "a_0_1")], 2),
        ([("/models/a/1", "a_0_0"), ("/models/a_0/1", "a_0_0")], 1),
        ([("/models/a_0/1", "a_0_0")], 0),
        ([("/models/a/1", "a_0_0"), ("/models/b/1", "a_0_1")], 1),
        ([("/tmp/folderXq3F9z/1", "a_0_0"), ("/tmp/folderXq3F9z/1", "a_0_1")], 2),
        ([("/models/a/1", "a_0_0"), ("/models/a/2", "a_0_1")], 1),
    ],
    ids=["its own", "beside another model's", "another model's", "of a given name", "fetched", "of another version"],
)
def test_a_process_counts_for_its_model_alone(proc: Path, stubs: list[tuple[str, str]], living: int) -> None:
    for pid, (folder, instance) in enumerate(stubs, 11):
        begin(proc, pid, 10, STUB, f"{folder}/model.py", "shm1", "1", "1", "10", "/opt", "64", instance, "DEFAULT")
    begin(proc, 99, 1, STUB)  # somebody else's, who says nothing
    described = {"name": "a", "instance_group": [{"name": "a_0", "kind": "KIND_CPU", "count": 2}]}
    assert model_processes.living_processes("grpc://localhost:8001", described, "1") == living
