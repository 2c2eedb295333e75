"""Whether a server's models will see a GPU, and if not, what to do: asked in a process as their own will be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .gpu_probe import LIBRARY

__all__ = ["GpuFinding", "find_gpus"]

_PROBE: Final = Path(__file__).with_name("gpu_probe.py")
_PATIENCE_S: Final = 60.0  # the first process on a machine without a persistence daemon waits for the GPU to come up
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_VISIBLE_IN_CONTAINERS: Final = "NVIDIA_VISIBLE_DEVICES"
_IN_CONTAINERS: Final = f"in a container: docker run --gpus all, or {_VISIBLE_IN_CONTAINERS}=all"
_MIG: Final = " MIG "  # in the names of instances of a divided GPU: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"

_ADVICE: Final = {
    "CUDA_ERROR_STUB_LIBRARY": "that is the toolkit's stub for linking, and no driver: take its folder out of "
    "LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the library and the kernel's module are of different releases: restart the "
    "machine after an update of the driver, and containers after that",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "that is CUDA's forward compatibility, which this GPU has not: take "
    "its folder (cuda/compat) out of LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_NOT_READY": "a service of the machine does not run: start nvidia-fabricmanager",
    "CUDA_ERROR_UNKNOWN": "look at the kernel's log (dmesg), and whether nvidia-smi works for this user",
}


@dataclass(frozen=True)
class GpuFinding:
    """Whether models will see a GPU.

    Attributes
    ----------
    devices : tuple of str
        The names of those that they will see.
    has_driver : bool
        Whether there is a driver's library at all.
    is_ready : bool
        Whether models can use GPU memory: a GPU is visible, with all that this package needs.
    text : str
        The same in words, and what to do; one line.
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
        Of that process; that of the server's stubs is :attr:`.EmbeddedServer.environment`.
    python : str
        Looked for in the environment's ``PATH``, as the stub does.

    Returns
    -------
    GpuFinding
        The GPUs that models see; if the process fails, the reason.
    """
    try:
        answer = subprocess.run(
            [python, "-I", str(_PROBE)],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _no_device(f"the driver has not answered for {_PATIENCE_S:g} s; see whether nvidia-smi does")
    except OSError as error:
        return _no_driver(f"no process of the models' Python could be asked: {error}")
    if answer.returncode != 0:
        last_words = answer.stderr.strip().splitlines()[-1:] or [f"status {answer.returncode}"]
        return _no_device(f"the process that asked the driver ended: {last_words[0]}")
    return read_facts(json.loads(answer.stdout), environment)


def read_facts(facts: Mapping[str, Any], environment: Mapping[str, str]) -> GpuFinding:
    """Return the meaning of a probe's output."""
    if not facts["library"]:
        return _no_driver(_without_library(facts))
    of_driver = f"{facts['library']}{_release(facts)}"
    if facts["error"] and facts["error"] not in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE"):
        advice = _ADVICE.get(facts["error"], "see CUDA's documentation of this error, and whether nvidia-smi works")
        return _no_device(f"the driver ({of_driver}) says {facts['error']}; {advice}")
    devices = tuple(facts.get("devices", ()))
    if not devices:
        return _no_device(f"there is a driver ({of_driver}), and it shows no device; {_why_hidden(environment)}")
    names = ", ".join(devices)
    if not facts["bindings"]:
        text = (
            f"models see {names}, but their Python has no cuda-bindings, without which no memory of GPUs is shared; "
            "pip install cuda-bindings there"
        )
        return GpuFinding(devices, has_driver=True, is_ready=False, text=text)
    text = f"models see {names}{_versions(facts)}{_limits(facts)}"
    return GpuFinding(devices, has_driver=True, is_ready=True, text=text)


def _no_driver(why: str) -> GpuFinding:
    return GpuFinding((), has_driver=False, is_ready=False, text=f"models see no GPU: {why}")


def _no_device(why: str) -> GpuFinding:
    return GpuFinding((), has_driver=True, is_ready=False, text=f"models see no GPU: {why}")


def _without_library(facts: Mapping[str, Any]) -> str:
    if facts["elsewhere"]:
        return f"{LIBRARY} is in {facts['elsewhere'][0]}, where it is not looked for; add that to LD_LIBRARY_PATH"
    if "cannot open shared object file: No such file" not in facts["refused"]:
        return f"the driver's library cannot be loaded: {facts['refused']}"
    if facts["has_device_files"]:
        return (
            f"there are devices, but no {LIBRARY}; in a container: NVIDIA_DRIVER_CAPABILITIES must have 'compute' "
            "(compute,utility is usual)"
        )
    return f"there is no NVIDIA driver here ({LIBRARY} is not found); install it on the machine; {_IN_CONTAINERS}"


def _why_hidden(environment: Mapping[str, str]) -> str:
    chosen = environment.get(_VISIBLE)
    if chosen is not None:
        return (
            f"{_VISIBLE} is {chosen!r}: give it numbers or UUIDs that nvidia-smi -L lists, those of MIG instances "
            "(MIG-…) where a GPU is divided, or unset it"
        )
    shown = environment.get(_VISIBLE_IN_CONTAINERS)
    if shown in ("", "none", "void"):
        return f"{_VISIBLE_IN_CONTAINERS} is {shown!r}, which hides all: set it to all"
    return f"{_IN_CONTAINERS}; with MIG, make an instance first (nvidia-smi mig -cgi … -C), and name it in {_VISIBLE}"


def _release(facts: Mapping[str, Any]) -> str:
    return f", release {facts['driver']}" if facts.get("driver") else ""


def _versions(facts: Mapping[str, Any]) -> str:
    return f" (CUDA {facts['cuda']}{_release(facts)}, cuda-bindings {facts['bindings']})"


def _limits(facts: Mapping[str, Any]) -> str:
    limits = []
    if any(_MIG in name for name in facts["devices"]):
        limits.append("of MIG: clients must use the very same instance (CUDA_VISIBLE_DEVICES), or nothing is shared")
    if not facts["backend_finds_it"]:
        limits.append(
            "Triton's Python backend looks for libcuda.so, which is not there: plain clients' tensors on GPUs do not "
            f"reach models until that is a link to {LIBRARY}"
        )
    return "".join(f"; {limit}" for limit in limits)
