"""The functions of Triton's own ``qa/common/shm_util.py``, for tests that call them as ``infer_util.py`` does.

They are for two inputs and the outputs OUTPUT0 and OUTPUT1, or for one of each ("either"); a region is a handle of
tritonclient's. :mod:`.shm_util` has them under the same names; its own functions are simpler.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from tritonclient.utils import serialized_byte_size

from ..client.unregistering import unregister_when_free
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


class _Memory:
    """The calls of tritonclient's module for shared memory of one kind."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.fill = module.set_shared_memory_region
        self.destroy = module.destroy_shared_memory_region


class _SystemMemory(_Memory):
    def create(self, name: str, byte_size: int) -> Any:
        return self._module.create_shared_memory_region(f"{name}_data", f"/{name}", byte_size)

    def register(self, client: Any, name: str, _: Any, byte_size: int) -> None:
        self.unregister(client, name)
        client.register_system_shared_memory(f"{name}_data", f"/{name}", byte_size)

    def unregister(self, client: Any, name: str) -> None:
        client.unregister_system_shared_memory(f"{name}_data")


class _CudaMemory(_Memory):
    def create(self, name: str, byte_size: int) -> Any:
        return self._module.create_shared_memory_region(f"{name}_data", byte_size, _DEVICE)

    def register(self, client: Any, name: str, handle: Any, byte_size: int) -> None:
        self.unregister(client, name)
        raw_handle = self._module.get_raw_handle(handle)
        client.register_cuda_shared_memory(f"{name}_data", raw_handle, _DEVICE, byte_size)

    def unregister(self, client: Any, name: str) -> None:
        client.unregister_cuda_shared_memory(f"{name}_data")


class _Output(NamedTuple):
    """An output that is wanted: where its handle is among the four, its name, and its handle if it was made before."""

    handle: int
    name: int
    precreated: int


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
    """Make the regions, and fill those of the inputs: the original's ``create_set_shm_regions``.

    Inputs lie side by side in their regions; strings as ``serialize_byte_tensor`` returns them. ``outputs`` has those
    of OUTPUT0 and OUTPUT1 that are wanted. Names are of the inputs, then of the outputs that are wanted; None for
    ``input0``, ``input1``, ``output0``, ``output1``. Precreated handles, for the outputs, stay the caller's.

    There are four handles, None for an output that is not wanted; no name and none of them where neither kind of memory
    is wanted. ValueError if both are. An error of tritonclient leaves nothing behind.
    """
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return [], []
    names = shm_region_names or _DEFAULT_NAMES
    handles: list[Any] = [None] * 4
    with _undone_by(memory) as made:
        for number, arrays in enumerate((input0_list, input1_list)):
            handles[number] = made(names[number], sum(map(_byte_size, arrays)))
        for output, byte_size in _wanted(outputs, output0_byte_size, output1_byte_size):
            handles[output.handle] = (
                made(names[output.name], byte_size)
                if precreated_shm_regions is None
                else precreated_shm_regions[output.precreated]
            )
        memory.fill(handles[0], input0_list)
        memory.fill(handles[1], input1_list)
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
    """Register the regions that :func:`create_set_regions` has made, also under names in use; refer inputs to them."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    registered = [(0, shm_region_names[0], input0_byte_size), (1, shm_region_names[1], input1_byte_size)]
    if precreated_shm_regions is None:
        for output, byte_size in _wanted(outputs, output0_byte_size, output1_byte_size):
            registered.append((output.handle, shm_region_names[output.name], byte_size))
    for number, name, byte_size in registered:
        memory.register(triton_client, name, shm_handles[number], byte_size)
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
    """Unregister and destroy regions but those made before, at the server that ``TRITONSERVER_IPADDR`` names."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    from tritonclient.http import InferenceServerClient  # noqa: PLC0415  # not everybody has it

    used = [(0, shm_regions[0]), (1, shm_regions[1])]
    if precreated_shm_regions is None:
        used += [(output.handle, shm_regions[output.name]) for output, _ in _wanted(outputs, 0, 0)]
    address = os.environ.get(_ADDRESS_VARIABLE, "localhost")
    with contextlib.ExitStack() as stack:
        client = InferenceServerClient(address if ":" in address else f"{address}:{_HTTP_PORT}")
        stack.callback(client.close)
        for number, name in used:
            stack.callback(memory.destroy, shm_handles[number])
            stack.callback(unregister_when_free, functools.partial(memory.unregister, client, name))


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
    with _undone_by(memory) as made:
        handles = [made(shm_region_names[0], input_byte_size), made(shm_region_names[1], output_byte_size)]
        memory.fill(handles[0], input_list)
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
    """Register the regions of input and output ``io_num``, by their prefixes, and refer both to them."""
    memory = _memory(use_system_shared_memory, use_cuda_shared_memory)
    if memory is None:
        return
    sizes, tensors = (input_byte_size, output_byte_size), (inputs, outputs)
    for prefix, handles, byte_size in zip(shm_region_prefix, shm_handles, sizes, strict=True):
        memory.register(triton_client, f"{prefix}{io_num}", handles[io_num], byte_size)
    for prefix, each, byte_size in zip(shm_region_prefix, tensors, sizes, strict=True):
        each[io_num].set_shared_memory(f"{prefix}{io_num}_data", byte_size)


class ShmLeakDetector:
    """Makes probes that fail if the pools of Python backends have grown, or this process has left memory behind.

    The original looks into the pools, by a module that comes with Triton's tests alone; :class:`ShmLeakProbe` at their
    size, which grows with the first large request.

    Parameters
    ----------
    prefix : str
        How the names of the pools begin in ``/dev/shm``.
    """

    def __init__(self, prefix: str = "triton_python_backend_shm_region") -> None:
        self._prefix = prefix

    def Probe(self) -> ShmLeakProbe:  # noqa: N802  # the original's name
        """Return a context manager that checks for leaks of its block."""
        return ShmLeakProbe(self._prefix)


def _memory(use_system_shared_memory: bool, use_cuda_shared_memory: bool) -> _SystemMemory | _CudaMemory | None:
    if use_system_shared_memory and use_cuda_shared_memory:
        raise ValueError("use_system_shared_memory and use_cuda_shared_memory are both set; expected one of them")
    if use_system_shared_memory:
        return _SystemMemory(import_module("tritonclient.utils.shared_memory"))
    if use_cuda_shared_memory:  # needs CUDA's library
        return _CudaMemory(import_module("tritonclient.utils.cuda_shared_memory"))
    return None


def _byte_size(array: Any) -> int:
    return int(serialized_byte_size(array) if array.dtype == object else array.nbytes)


def _wanted(outputs: Collection[str], *byte_sizes: int) -> Iterator[tuple[_Output, int]]:
    """Yield the outputs that are wanted, with their sizes: names and handles made before follow one another."""
    numbers = [number for number in (0, 1) if f"OUTPUT{number}" in outputs]
    for place, number in enumerate(numbers):
        yield _Output(2 + number, 2 + place, place), byte_sizes[number]


@contextlib.contextmanager
def _undone_by(memory: _SystemMemory | _CudaMemory) -> Iterator[Any]:
    """Yield what makes regions, which are destroyed if the block raises."""
    with contextlib.ExitStack() as undoing:

        def made(name: str, byte_size: int) -> Any:
            handle = memory.create(name, byte_size)
            undoing.callback(memory.destroy, handle)
            return handle

        yield made
        undoing.pop_all()
