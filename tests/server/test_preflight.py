"""Whether models will see a GPU, and the reasons why not, each with what to do."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import EmbeddedServer, find_gpus
from shm_backend_utils.server.preflight import GpuFinding, read_facts

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
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_driver = pytest.mark.skipif(has_driver(), reason="there is a driver here")


def test_a_gpu_that_models_see_is_named_with_its_versions() -> None:
    assert read_facts(FACTS, {}) == GpuFinding(
        ("NVIDIA H200",),
        has_driver=True,
        is_ready=True,
        text="models see NVIDIA H200 (CUDA 13.0, release 580.95, cuda-bindings 13.0.3)",
    )


def test_all_gpus_are_named() -> None:
    assert read_facts({**FACTS, "devices": ["A", "B"]}, {}).text.startswith("models see A, B (")


@pytest.mark.parametrize(
    ("facts", "environment", "words"),
    [
        (NO_LIBRARY, {}, "there is no NVIDIA driver here (libcuda.so.1 is not found); install it on the machine; in a"),
        ({**NO_LIBRARY, "has_device_files": True}, {}, "NVIDIA_DRIVER_CAPABILITIES must have 'compute'"),
        ({**NO_LIBRARY, "elsewhere": ["/opt/nvidia"]}, {}, "libcuda.so.1 is in /opt/nvidia, where it is not looked"),
        ({**NO_LIBRARY, "refused": "invalid ELF header"}, {}, "library cannot be loaded: invalid ELF header"),
        ({**FACTS, "error": "CUDA_ERROR_NO_DEVICE", "devices": []}, {}, "it shows no device; in a container: docker"),
        ({**FACTS, "devices": []}, {}, "with MIG, make an instance first"),
        ({**FACTS, "devices": []}, {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES is '7': give it numbers or"),
        ({**FACTS, "devices": []}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is '': give it numbers or"),
        ({**FACTS, "devices": []}, {"NVIDIA_VISIBLE_DEVICES": "void"}, "NVIDIA_VISIBLE_DEVICES is 'void', which hides"),
        ({**FACTS, "error": "CUDA_ERROR_STUB_LIBRARY"}, {}, "that is the toolkit's stub for linking, and no driver"),
        ({**FACTS, "error": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {}, "the library and the kernel's module are of"),
        ({**FACTS, "error": "CUDA_ERROR_LAUNCH_FAILED"}, {}, "says CUDA_ERROR_LAUNCH_FAILED; see CUDA's documentation"),
    ],
)
def test_each_reason_for_none_is_told_with_what_to_do(
    facts: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    finding = read_facts(facts, environment)
    assert finding.text.startswith("models see no GPU: ")
    assert words in finding.text
    assert "\n" not in finding.text
    assert not finding.is_ready


def test_a_gpu_without_the_bindings_is_seen_and_not_ready() -> None:
    finding = read_facts({**FACTS, "bindings": ""}, {})
    assert finding.devices == ("NVIDIA H200",)
    assert not finding.is_ready
    assert "their Python has no cuda-bindings" in finding.text


def test_an_instance_of_a_divided_gpu_is_usable_with_a_word_of_warning() -> None:
    finding = read_facts({**FACTS, "devices": ["NVIDIA A100-SXM4-40GB MIG 1g.5gb"]}, {})
    assert finding.is_ready
    assert "clients must use the very same instance" in finding.text


def test_a_driver_that_tritons_backend_does_not_find_is_told() -> None:
    assert "Triton's Python backend looks for libcuda.so" in read_facts({**FACTS, "backend_finds_it": False}, {}).text


# --- by a process


@without_driver
def test_without_a_driver_a_process_says_so() -> None:
    finding = find_gpus(os.environ, sys.executable)
    assert (finding.has_driver, finding.is_ready) == (False, False)
    assert finding.text.startswith("models see no GPU: there is no NVIDIA driver here")


@without_driver
def test_a_file_of_that_name_that_is_no_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("none")
    finding = find_gpus({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, sys.executable)
    assert "the driver's library cannot be loaded: " in finding.text


def test_a_python_that_is_not_there_is_told() -> None:
    assert "no process of the models' Python could be asked" in find_gpus({"PATH": "/nowhere"}, "no-python").text


def test_a_process_that_dies_is_told() -> None:
    assert find_gpus(os.environ, "false").text == "models see no GPU: the process that asked the driver ended: status 1"


@without_driver
def test_a_server_that_does_not_start_for_lack_of_a_gpu_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "m" / "1" / "model.py").write_text("class TritonPythonModel:\n    pass\n")
    with pytest.raises(MachineError, match="has kind KIND_GPU but no GPUs are available") as failure:
        EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "log", numpy="own")
    assert "models see no GPU: there is no NVIDIA driver here" in str(failure.value)
