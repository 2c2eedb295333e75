"""The functions of Triton's own ``qa/common/shm_util.py``, for tests that call them as ``infer_util.py`` does.

They are for two inputs and the outputs OUTPUT0 and OUTPUT1, or for one of each ("either"); a region is a handle of
tritonclient's. :mod:`.shm_util` has them under the same names; its own functions are simpler.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final

from tritonclient.utils import serialized_byte_size

from ..client.paths.triton_shm import unregister_when_free
from ..testing.leak_probe import ShmLeakProbe

__all__ = [
    "ShmLeakDetector",
    "create_set_either_shm_region",
    "create_set_regions",
    "register_add_either_shm_regions",
    "register_add_shm_regions",
    "unregister_cleanup_regions",
]

_ADDRESS_VARIABLE: Final = "TRITONSERVER_IPADDR"
_DEFAULT_NAMES: Final = ("input0", "input1", "output0", "output1")
_HTTP_PORT: Final = 8000
_DEVICE: Final = 0


class _SystemMemory:
    """tritonclient's calls for shared memory on the host, in the order of their use."""

    module_name: ClassVar = "shared_memory"

    def __init__(self) -> None:
        self._module = import_module(f"tritonclient.utils.{self.module_name}")
        self.fill = self._module.set_shared_memory_region
        self.destroy = self._module.destroy_shared_memory_region

    def create(self, name: str, byte_size: int) -> Any:
        return self._module.create_shared_memory_region(f"{name}_data", f"/{name}", byte_size)

    def register(self, client: Any, name: str, _: Any, byte_size: int) -> None:
        client.register_system_shared_memory(f"{name}_data", f"/{name}", byte_size)

    def unregister(self, client: Any, name: str) -> None:
        client.unregister_system_shared_memory(f"{name}_data")


class _CudaMemory(_SystemMemory):
    """tritonclient's calls for the memory of a GPU, in the order of their use."""

    module_name = "cuda_shared_memory"

    def create(self, name: str, byte_size: int) -> Any:
        return self._module.create_shared_memory_region(f"{name}_data", byte_size, _DEVICE)

    def register(self, client: Any, name: str, handle: Any, byte_size: int) -> None:
        client.register_cuda_shared_memory(f"{name}_data", self._module.get_raw_handle(handle), _DEVICE, byte_size)

    def unregister(self, client: Any, name: str) -> None:
        client.unregister_cuda_shared_memory(f"{name}_data")


def create_set_regions(
    input0_list: Sequence[Any],
    input1_list: Sequence[Any],
    output0_byte_size: int,
    output1_byte_size: int,
    outputs: Collection[str],
    shm_region_names: Sequence[str] | None,
    precreated_shm_regions: Sequence[Any] | None,
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
) -> tuple[Sequence[str], list[Any]]:
    """Make the regions, and fill those of the inputs, as the original's ``create_set_shm_regions`` does.

    An input's arrays lie side by side in its region, strings as ``serialize_byte_tensor`` returns them. ``outputs``
    names the wanted ones of OUTPUT0 and OUTPUT1. The region names are those of the inputs, then of the wanted outputs;
    None means ``input0``, ``input1``, ``output0``, ``output1``. The caller keeps precreated handles, of the outputs.

    It returns the names and four handles, None for an unwanted output. Without a kind of memory, both lists are empty;
    with both kinds, it raises ValueError. If tritonclient fails, nothing is left behind.
    """
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return [], []
    names = shm_region_names or _DEFAULT_NAMES
    sizes = [sum(map(_byte_size, arrays)) for arrays in (input0_list, input1_list)]
    sizes += [output0_byte_size, output1_byte_size]
    handles: list[Any] = [None] * 4
    with contextlib.ExitStack() as undoing:
        for number, place in _numbers_and_places(outputs):
            if number < 2 or precreated_shm_regions is None:
                handles[number] = memory.create(names[place], sizes[number])
                undoing.callback(memory.destroy, handles[number])
            else:
                handles[number] = precreated_shm_regions[place - 2]
        memory.fill(handles[0], input0_list)
        memory.fill(handles[1], input1_list)
        undoing.pop_all()
    return names, handles


def register_add_shm_regions(
    inputs: Sequence[Any],
    outputs: Collection[str],
    shm_region_names: Sequence[str],
    precreated_shm_regions: Sequence[Any] | None,
    shm_handles: Sequence[Any],
    input0_byte_size: int,
    input1_byte_size: int,
    output0_byte_size: int,
    output1_byte_size: int,
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
    triton_client: Any,
) -> None:
    """Register the regions of :func:`create_set_regions`, also under names in use, and make the inputs use them."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    sizes = (input0_byte_size, input1_byte_size, output0_byte_size, output1_byte_size)
    for number, place in _numbers_and_places(outputs if precreated_shm_regions is None else ()):
        memory.unregister(triton_client, shm_region_names[place])
        memory.register(triton_client, shm_region_names[place], shm_handles[number], sizes[number])
    inputs[0].set_shared_memory(f"{shm_region_names[0]}_data", input0_byte_size)
    inputs[1].set_shared_memory(f"{shm_region_names[1]}_data", input1_byte_size)


def unregister_cleanup_regions(
    shm_regions: Sequence[str],
    shm_handles: Sequence[Any],
    precreated_shm_regions: Sequence[Any] | None,
    outputs: Collection[str],
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
) -> None:
    """Unregister and destroy regions, except precreated ones, at the server that ``TRITONSERVER_IPADDR`` names."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    from tritonclient.http import InferenceServerClient  # noqa: PLC0415  # tritonclient.http may not be installed

    address = os.environ.get(_ADDRESS_VARIABLE, "localhost")
    with contextlib.ExitStack() as stack:
        client = InferenceServerClient(address if ":" in address else f"{address}:{_HTTP_PORT}")
        stack.callback(client.close)
        for number, place in _numbers_and_places(outputs if precreated_shm_regions is None else ()):
            stack.callback(memory.destroy, shm_handles[number])
            stack.callback(unregister_when_free, functools.partial(memory.unregister, client, shm_regions[place]))


def create_set_either_shm_region(
    shm_region_names: Sequence[str],
    input_list: Sequence[Any],
    input_byte_size: int,
    output_byte_size: int,
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
) -> list[Any]:
    """Make a region for an input and one for an output; fill the first; return both handles, or none."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return []
    with contextlib.ExitStack() as undoing:
        handles = []
        for name, byte_size in zip(shm_region_names[:2], (input_byte_size, output_byte_size), strict=True):
            handles.append(memory.create(name, byte_size))
            undoing.callback(memory.destroy, handles[-1])
        memory.fill(handles[0], input_list)
        undoing.pop_all()
    return handles


def register_add_either_shm_regions(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    shm_region_prefix: Sequence[str],
    shm_handles: Sequence[Sequence[Any]],
    io_num: int,
    input_byte_size: int,
    output_byte_size: int,
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
    triton_client: Any,
) -> None:
    """Register the regions of input and output ``io_num``, by their prefixes, and make both tensors use them."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    sizes, tensors = (input_byte_size, output_byte_size), (inputs, outputs)
    for prefix, handles, byte_size in zip(shm_region_prefix, shm_handles, sizes, strict=True):
        memory.unregister(triton_client, f"{prefix}{io_num}")
        memory.register(triton_client, f"{prefix}{io_num}", handles[io_num], byte_size)
    for prefix, each, byte_size in zip(shm_region_prefix, tensors, sizes, strict=True):
        each[io_num].set_shared_memory(f"{prefix}{io_num}_data", byte_size)


class ShmLeakDetector:
    """Makes probes that fail if this process has left memory behind, or a pool of Python backends has grown.

    The original looks into the pools, by a module that only Triton's tests have. :class:`ShmLeakProbe` looks at their
    size, which grows with the first large request.
    """

    def __init__(self, prefix: str = "triton_python_backend_shm_region") -> None:
        self._prefix = prefix

    def Probe(self) -> ShmLeakProbe:  # noqa: N802  # the original's name
        """Return a context manager that checks for leaks of its block."""
        return ShmLeakProbe(self._prefix)


def _memory(use_system_shared_memory: bool, use_cuda_shared_memory: bool) -> _SystemMemory | None:
    if use_system_shared_memory and use_cuda_shared_memory:
        raise ValueError("use_system_shared_memory and use_cuda_shared_memory are both set; expected one of them")
    if use_system_shared_memory:
        return _SystemMemory()
    return _CudaMemory() if use_cuda_shared_memory else None


def _byte_size(array: Any) -> int:
    return int(serialized_byte_size(array) if array.dtype == object else array.nbytes)


def _numbers_and_places(outputs: Collection[str]) -> list[tuple[int, int]]:
    """Return the numbers of the needed handles, each with the place of its name: names have no gaps."""
    wanted = [number for number in (2, 3) if f"OUTPUT{number - 2}" in outputs]
    return [(0, 0), (1, 1), *zip(wanted, (2, 3), strict=False)]
