"""Sample models that need a GPU: refused by a real server that has none, and left out where there is none."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shm_backend_utils.cli.common import server
from shm_backend_utils.cli.common.server import REPOSITORY
from shm_backend_utils.errors import MachineError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.server import EmbeddedServer

OF_GPUS = {"gpu_multiply", "gpu_normalize"}
OF_THE_HOST = {config.parent.name for config in REPOSITORY.glob("*/config.pbtxt")} - OF_GPUS


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a GPU, on which they load")
def test_models_for_gpus_do_not_load_without_one_and_say_why(tmp_path: Path) -> None:
    for name, kind in itertools.product(OF_GPUS, ("KIND_GPU", "KIND_CPU")):
        model = tmp_path / "models" / f"{name}_{kind}"
        shutil.copytree(REPOSITORY / name, model, ignore=shutil.ignore_patterns("__pycache__"))
        config = (model / "config.pbtxt").read_text()
        (model / "config.pbtxt").write_text(config.replace("KIND_GPU", kind))
    with pytest.raises(MachineError) as failure:
        EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "server.log")
    by_the_server = "has kind KIND_GPU but no GPUs are available"
    by_the_model = "MachineError: .*(needs NVIDIA.s cuda-bindings|needs NVIDIA.s driver|no GPU is visible)"
    for name in OF_GPUS:
        assert re.search(rf"failed to load '{name}_KIND_GPU' version 1: .*{by_the_server}", str(failure.value))
        assert re.search(rf"failed to load '{name}_KIND_CPU' version 1: .*{by_the_model}", str(failure.value))


def gpus(count: int) -> Any:
    return SimpleNamespace(device_count=lambda: count)


def no_bindings() -> Any:
    raise MachineError("there are no bindings")


SERVED: list[tuple[Any, str, set[str], set[str]]] = [
    (lambda: gpus(2), "/dev/null", set(), OF_THE_HOST | OF_GPUS),
    (lambda: gpus(2), "/dev/none", set(), OF_THE_HOST),
    (lambda: gpus(2), "/dev/null", {"cupy"}, OF_THE_HOST),
    (lambda: gpus(0), "/dev/null", set(), OF_THE_HOST),
    (no_bindings, "/dev/null", set(), OF_THE_HOST),
]


@pytest.mark.parametrize(("load", "file", "missing", "expected"), SERVED)
def test_models_for_gpus_are_served_only_where_one_is(
    load: Any, file: str, missing: set[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    monkeypatch.setattr(server, "CudaAccess", lambda: CudaAccess(load))
    monkeypatch.setattr(server, "_DEVICE_FILES", (file,))
    server.copy_sample_models(tmp_path)
    assert {config.parent.name for config in tmp_path.glob("*/config.pbtxt")} == expected
    assert all((tmp_path / name / "1").is_dir() for name in expected)


def test_a_folder_that_takes_no_models_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = "^models cannot be copied to .*/file/models: Not a directory; make room.*$"
    with pytest.raises(MachineError, match=said):
        server.copy_models([REPOSITORY / "identity"], tmp_path / "file" / "models")
