"""Finds out, in a process like that of a server's models, whether they will see a GPU, and if not, what to do.

That process runs this file by its path, in the Python of the server's stub, so the file needs the standard library
alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["GpuFinding", "find_gpus"]

_LIBRARY: Final = "libcuda.so.1"
_BACKENDS_NAME: Final = "libcuda.so"  # by which Triton's Python backend opens it
_USUAL_FOLDERS: Final = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/cuda/compat",
)
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_NAME_LENGTH: Final = 256
_PATIENCE_S: Final = 60.0  # the first process on a machine without a persistence daemon waits for the GPU to come up
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_VISIBLE_IN_CONTAINERS: Final = "NVIDIA_VISIBLE_DEVICES"
_IN_CONTAINERS: Final = f"in a container: docker run --gpus all, or {_VISIBLE_IN_CONTAINERS}=all"
_MIG: Final = " MIG "  # in the names of instances of a divided GPU: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"

_REMEDIES: Final = {
    "CUDA_ERROR_STUB_LIBRARY": "that is the toolkit's stub for linking, not a driver: remove its folder from "
    "LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the library and the kernel module have different versions: restart the "
    "machine after an update of the driver, and containers after that",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "this GPU does not support CUDA's forward compatibility: remove "
    "its folder (cuda/compat) from LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_NOT_READY": "a service of the machine is not running: start nvidia-fabricmanager",
    "CUDA_ERROR_UNKNOWN": "look at the kernel's log (dmesg), and check whether nvidia-smi works for this user",
}


@dataclass(frozen=True)
class GpuFinding:
    """Whether models will see a GPU.

    Attributes
    ----------
    devices : tuple of str
        The names of the GPUs that they will see.
    has_driver : bool
        Whether there is a driver's library at all.
    is_ready : bool
        Whether models can use GPU memory: a GPU is visible, with all that this package needs.
    text : str
        The finding in words, and what to do, in one line.
    """

    devices: tuple[str, ...]
    has_driver: bool
    is_ready: bool
    text: str


def find_gpus(environment: Mapping[str, str], python: str = "python3") -> GpuFinding:
    """Ask the driver in a process of its own.

    Parameters
    ----------
    environment : mapping
        The process' variables; those of the server's stubs are :attr:`.EmbeddedServer.environment`.
    python : str
        Its Python, looked up in the environment's ``PATH``, as the stub does.

    Returns
    -------
    GpuFinding
        The GPUs that models see; if the process fails, the reason.
    """
    try:
        answer = subprocess.run(
            [python, "-I", __file__],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _no_device(f"the driver has not answered for {_PATIENCE_S:g} s; see whether nvidia-smi does")
    except OSError as error:
        return _no_driver(f"the models' Python cannot be started: {error}")
    if answer.returncode != 0:
        last_words = answer.stderr.strip().splitlines()[-1:] or [f"status {answer.returncode}"]
        return _no_device(f"the process that asked the driver ended: {last_words[0]}")
    return read_facts(json.loads(answer.stdout), environment)


def read_facts(facts: Mapping[str, Any], environment: Mapping[str, str]) -> GpuFinding:
    """Return the finding that a probe's output means."""
    if not facts["library"]:
        return _no_driver(_without_library(facts))
    release = f", release {facts['driver']}" if facts.get("driver") else ""
    of_driver = f"{facts['library']}{release}"
    if facts["error"] and facts["error"] not in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE"):
        remedy = _REMEDIES.get(facts["error"], "see CUDA's documentation of this error, and whether nvidia-smi works")
        return _no_device(f"the driver ({of_driver}) says {facts['error']}; {remedy}")
    devices = tuple(facts.get("devices", ()))
    if not devices:
        return _no_device(f"there is a driver ({of_driver}), and it shows no device; {_why_hidden(environment)}")
    names = ", ".join(devices)
    if not facts["bindings"]:
        text = (
            f"models see {names}, but their Python has no cuda-bindings, which sharing GPU memory needs; "
            "pip install cuda-bindings there"
        )
        return GpuFinding(devices, has_driver=True, is_ready=False, text=text)
    versions = f"CUDA {facts['cuda']}{release}, cuda-bindings {facts['bindings']}"
    text = f"models see {names} ({versions}){_limits(facts)}"
    return GpuFinding(devices, has_driver=True, is_ready=True, text=text)


def _no_driver(why: str) -> GpuFinding:
    return GpuFinding((), has_driver=False, is_ready=False, text=f"models see no GPU: {why}")


def _no_device(why: str) -> GpuFinding:
    return GpuFinding((), has_driver=True, is_ready=False, text=f"models see no GPU: {why}")


def _without_library(facts: Mapping[str, Any]) -> str:
    if facts["elsewhere"]:
        return f"{_LIBRARY} is in {facts['elsewhere'][0]}, where the loader does not look; add that to LD_LIBRARY_PATH"
    if "cannot open shared object file: No such file" not in facts["refused"]:
        return f"the driver's library cannot be loaded: {facts['refused']}"
    if facts["has_device_files"]:
        return (
            f"there are devices, but no {_LIBRARY}; in a container: NVIDIA_DRIVER_CAPABILITIES must have 'compute' "
            "(compute,utility is usual)"
        )
    return f"there is no NVIDIA driver here ({_LIBRARY} is not found); install it on the machine; {_IN_CONTAINERS}"


def _why_hidden(environment: Mapping[str, str]) -> str:
    chosen = environment.get(_VISIBLE)
    if chosen is not None:
        return (
            f"{_VISIBLE} is {chosen!r}: unset it, or give it numbers or UUIDs from nvidia-smi -L (for a divided GPU, "
            "those that begin with MIG-)"
        )
    shown = environment.get(_VISIBLE_IN_CONTAINERS)
    if shown in ("", "none", "void"):
        return f"{_VISIBLE_IN_CONTAINERS} is {shown!r}, which hides all: set it to all"
    return f"{_IN_CONTAINERS}; with MIG, make an instance first (nvidia-smi mig -cgi … -C), and name it in {_VISIBLE}"


def _limits(facts: Mapping[str, Any]) -> str:
    limits = []
    if any(_MIG in name for name in facts["devices"]):
        limits.append("with MIG, memory is shared only with clients on the same instance (CUDA_VISIBLE_DEVICES)")
    if not facts["backend_finds_it"]:
        limits.append(
            "Triton's Python backend looks for libcuda.so, which is not there: plain clients' tensors on GPUs do not "
            f"reach models until that is a link to {_LIBRARY}"
        )
    return "".join(f"; {limit}" for limit in limits)


def probe() -> dict[str, Any]:
    """Return CUDA's answers in this process's environment; unavailable ones are left out."""
    facts: dict[str, Any] = {
        "has_device_files": Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(),
        "bindings": _bindings_version(),
    }
    with contextlib.suppress(OSError):
        facts["driver"] = next((word for word in _DRIVER_FILE.read_text().split() if word[0].isdigit()), "")
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        elsewhere = [folder for folder in _USUAL_FOLDERS if (Path(folder) / _LIBRARY).exists()]
        return {**facts, "library": "", "refused": str(error), "elsewhere": elsewhere}
    facts["library"] = _path_of_library()
    facts["backend_finds_it"] = False
    with contextlib.suppress(OSError):
        facts["backend_finds_it"] = bool(ctypes.CDLL(_BACKENDS_NAME))
    facts["error"] = _error_name(cuda, cuda.cuInit(0))
    if not facts["error"]:
        version, count = ctypes.c_int(), ctypes.c_int()
        cuda.cuDriverGetVersion(ctypes.byref(version))
        facts["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        facts["error"] = _error_name(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
        facts["devices"] = [_device_name(cuda, number) for number in range(count.value)]
    return facts


def _device_name(cuda: ctypes.CDLL, number: int) -> str:
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    device = ctypes.c_int(number)
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, _NAME_LENGTH, device)
    return name.value.decode(errors="replace") or f"GPU {number}"


def _error_name(cuda: ctypes.CDLL, result: int) -> str:
    if result == 0:
        return ""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(result, ctypes.byref(name))
    return (name.value or f"error {result}".encode()).decode()


def _path_of_library() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libcuda.so" in line:
                return line[line.index("/") :]
    return _LIBRARY


def _bindings_version() -> str:
    try:
        from cuda.bindings import driver  # noqa: PLC0415, F401  # the import itself is the check
    except ImportError:
        return ""
    return metadata.version("cuda-bindings")


if __name__ == "__main__":
    print(json.dumps(probe()))
