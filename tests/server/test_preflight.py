"""Whether models will see a GPU, and the reasons why not, each with what to do."""

from __future__ import annotations

import ctypes
import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import EmbeddedServer, Installation, find_gpus
from shm_backend_utils.server.install import default_folder
from shm_backend_utils.server.preflight import GpuFinding, read_facts
from shm_backend_utils.testing.fake_cuda.driver import library
from tests.unit.harness.folders import FINE, folder_of

CONFIG = 'backend: "python" instance_group [ { kind: KIND_GPU } ]'
FACTS: dict[str, Any] = {
    "library": "/usr/lib/libcuda.so.1",
    "driver": "580.95",
    "has_device_files": True,
    "backend_finds_it": True,
    "error": "",
    "cuda": "13.0",
    "devices": ["NVIDIA H200"],
    "bindings": "13.0.3",
}
NO_LIBRARY: dict[str, Any] = {
    "library": "",
    "refused": "libcuda.so.1: cannot open shared object file: No such file or directory",
    "elsewhere": [],
    "has_device_files": False,
    "bindings": "13.0.3",
}


def has_driver() -> bool:
    """Whether there is a driver, other than the fake one that tests may have loaded."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return not hasattr(found, "fake_cuda_live")


@pytest.fixture
def with_fake() -> dict[str, str]:
    """An environment in which processes find the fake driver, as a real one may be found."""
    return {**os.environ, "LD_LIBRARY_PATH": str(library().parent)}


without_driver = pytest.mark.skipif(has_driver(), reason="there is a driver here")


def test_a_gpu_that_models_see_is_named_with_its_versions() -> None:
    text = "models see NVIDIA H200 (CUDA 13.0, release 580.95, cuda-bindings 13.0.3)"
    assert read_facts(FACTS, {}) == GpuFinding(("NVIDIA H200",), has_driver=True, is_ready=True, text=text)


@pytest.mark.parametrize(
    ("facts", "environment", "words"),
    [
        (NO_LIBRARY, {}, "there is no NVIDIA driver here (libcuda.so.1 is not found); install it on the machine; in a"),
        ({**NO_LIBRARY, "has_device_files": True}, {}, "NVIDIA_DRIVER_CAPABILITIES must have 'compute'"),
        ({**NO_LIBRARY, "elsewhere": ["/opt/nvidia"]}, {}, "libcuda.so.1 is in /opt/nvidia, where the loader"),
        ({**NO_LIBRARY, "refused": "invalid ELF header"}, {}, "library cannot be loaded: invalid ELF header"),
        ({**FACTS, "error": "CUDA_ERROR_NO_DEVICE", "devices": []}, {}, "it shows no device; in a container: docker"),
        ({**FACTS, "devices": []}, {}, "with MIG, make an instance first"),
        ({**FACTS, "devices": []}, {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES is '7': unset it, or give it"),
        ({**FACTS, "devices": []}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is '': unset it, or give it"),
        ({**FACTS, "devices": []}, {"NVIDIA_VISIBLE_DEVICES": "void"}, "NVIDIA_VISIBLE_DEVICES is 'void', which hides"),
        ({**FACTS, "error": "CUDA_ERROR_STUB_LIBRARY"}, {}, "that is the toolkit's stub for linking, not a driver"),
        ({**FACTS, "error": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {}, "the library and the kernel module"),
        ({**FACTS, "error": "CUDA_ERROR_LAUNCH_FAILED"}, {}, "says CUDA_ERROR_LAUNCH_FAILED; see CUDA's documentation"),
    ],
)
def test_each_reason_for_none_has_its_remedy(facts: dict[str, Any], environment: dict[str, str], words: str) -> None:
    finding = read_facts(facts, environment)
    assert finding.text.startswith("models see no GPU: ")
    assert words in finding.text
    assert "\n" not in finding.text
    assert not finding.is_ready


NOT_QUITE_FINE: list[tuple[dict[str, Any], bool, str]] = [
    ({"bindings": ""}, False, "models see NVIDIA H200, but their Python has no cuda-bindings"),
    ({"backend_finds_it": False}, True, "Triton's Python backend looks for libcuda.so"),
    ({"devices": ["NVIDIA A100-SXM4-40GB MIG 1g.5gb"]}, True, "only with clients on the same instance"),
]


def test_a_gpu_that_is_not_quite_fine_is_named_with_why() -> None:
    for facts, is_ready, words in NOT_QUITE_FINE:
        finding = read_facts({**FACTS, **facts}, {})
        assert (len(finding.devices), words in finding.text, finding.is_ready) == (1, True, is_ready)


@without_driver
def test_without_a_driver_a_process_says_so() -> None:
    finding = find_gpus(os.environ, sys.executable)
    assert (finding.has_driver, finding.is_ready) == (False, False)
    assert finding.text.startswith("models see no GPU: there is no NVIDIA driver here")


def test_a_driver_that_is_found_through_the_environment_is_asked(with_fake: dict[str, str]) -> None:
    finding = find_gpus({**with_fake, "SHM_FAKE_CUDA_DRIVER_VERSION": "12080"}, sys.executable)
    assert finding.devices == ("fake CUDA driver, no GPU",) * 2
    assert finding.is_ready
    assert "(CUDA 12.8, " in finding.text


def test_a_python_without_the_bindings_is_told(with_fake: dict[str, str], tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    finding = find_gpus({**with_fake, "PATH": str(tmp_path / "bare" / "bin")})
    assert "models see fake CUDA driver, no GPU, fake CUDA driver, no GPU, but their Python has no cuda" in finding.text


def test_a_process_that_dies_or_does_not_start_is_told() -> None:
    assert "the models' Python cannot be started" in find_gpus({"PATH": "/nowhere"}, "no-python").text
    assert find_gpus(os.environ, "false").text == "models see no GPU: the process that asked the driver ended: status 1"


@pytest.mark.skipif(
    not list(Installation(default_folder()).libraries.glob("libcudart*")), reason="the server was built without CUDA"
)
@without_driver
def test_a_server_that_does_not_start_for_lack_of_a_gpu_says_what_to_do(tmp_path: Path) -> None:
    folder_of(tmp_path / "models", FINE, CONFIG)
    with pytest.raises(MachineError, match="has kind KIND_GPU but no GPUs are available") as failure:
        EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "log", numpy="own")
    assert "models see no GPU: there is no NVIDIA driver here" in str(failure.value)


@without_driver
def test_the_environment_of_a_server_that_runs_is_asked(
    tmp_path: Path, with_fake: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Older than the CUDA that the server was built for, so that it says that there is none, and goes on.
    monkeypatch.setenv("SHM_FAKE_CUDA_DRIVER_VERSION", "11000")
    monkeypatch.setenv("LD_LIBRARY_PATH", with_fake["LD_LIBRARY_PATH"])
    folder_of(tmp_path / "models", FINE, CONFIG.replace("KIND_GPU", "KIND_CPU"))
    with EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "log", numpy="own") as server:
        assert find_gpus(server.environment).devices == ("fake CUDA driver, no GPU",) * 2
