"""Shared memory around an inference in a test, with plain tritonclient: make it, fill it, register it, and clean it up.

``docs/migrating.md`` has an example.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, overload

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from ..gpu.memory.access import CudaAccess
from ..testing.leak_probe import ShmLeakProbe
from . import upstream_calls
from .shm_regions import CudaShmHandle, ShmHandle, SystemShmHandle
from .shm_tensors import GivenInput, Room, given_inputs, output_rooms, region_rooms
from .upstream_calls import (
    ShmLeakDetector,
    create_set_either_shm_region,
    register_add_either_shm_regions,
    register_add_shm_regions,
)

__all__ = [
    "CudaShmHandle",
    "ShmHandle",
    "ShmLeakDetector",
    "ShmLeakProbe",
    "ShmRegions",
    "SystemShmHandle",
    "cleanup_shm_regions",
    "create_set_cuda_shm_regions",
    "create_set_either_shm_region",
    "create_set_shm_regions",
    "register_add_either_shm_regions",
    "register_add_shm_regions",
    "unregister_cleanup_shm_regions",
]

_PROTOCOLS: Final = ("grpc", "http")
_OWN_ARGUMENTS_TO_CREATE: Final = 6
_OWN_ARGUMENTS_TO_CLEAN_UP: Final = 3


class ShmRegions(NamedTuple):
    """An inference's regions, the inputs' first, which the caller owns, and the inputs and outputs for ``infer``."""

    shm_handles: list[ShmHandle]
    inputs: list[Any]
    outputs: list[Any]


@overload
def create_set_shm_regions(
    input_list: Sequence[Any],
    output_list: Sequence[tuple[str, int]],
    shm_region_names: Sequence[str] | None,
    shm_region_byte_sizes: Sequence[int] | None,
    triton_client: Any,
    protocol: str,
) -> ShmRegions: ...
@overload
def create_set_shm_regions(
    input0_list: Sequence[Any],
    input1_list: Sequence[Any],
    output0_byte_size: int,
    output1_byte_size: int,
    outputs: Collection[str],
    shm_region_names: Sequence[str] | None,
    precreated_shm_regions: Sequence[Any] | None,
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
) -> tuple[Sequence[str], list[Any]]: ...
def create_set_shm_regions(*arguments: Any, **named: Any) -> Any:  # noqa: D417  # they are the overloads'
    """Make one region of system shared memory for each tensor, fill those of the inputs, and register them all.

    With the nine arguments of the original in Triton's tests, it does the same: see :mod:`.upstream_calls`.

    Parameters
    ----------
    input_list : sequence
        Of ``(name, value)``, or of values alone, which are then called ``INPUT0``, ``INPUT1`` and so on. A value is a
        NumPy array of any data type of Triton's, with strings as ``object``, ``S`` or ``U``. Or it is a list of arrays:
        the rows of the tensor, or the tensor itself if it is only one.
    output_list : sequence of (str, int)
        Names, and how many bytes each output may have.
    shm_region_names : sequence of str or None
        One for each tensor, inputs first: the region's registered name. A name that is registered already is taken
        over. None for ``input0``, ``input1``, …, ``output0``, ….
    shm_region_byte_sizes : sequence of int or None
        In the same order; a region may be larger than its tensor. None for just as large.
    triton_client : tritonclient.grpc.InferenceServerClient or tritonclient.http.InferenceServerClient
        On the server's machine.
    protocol : str
        The client's: ``"grpc"`` or ``"http"``.

    Returns
    -------
    ShmRegions
        ``(shm_handles, inputs, outputs)``. End with :func:`unregister_cleanup_shm_regions`.

    Raises
    ------
    ValueError
        An argument is wrong. Every :class:`TensorError` is a ValueError.
    MachineError, tritonclient.utils.InferenceServerException
        ``/dev/shm`` has no room; or the server refuses a region, or does not answer. Nothing is left behind.
    """  # the arguments are those of the overloads
    if len(arguments) + len(named) > _OWN_ARGUMENTS_TO_CREATE:
        return upstream_calls.create_set_regions(*arguments, **named)
    return _create(*arguments, **named, make=SystemShmHandle, cuda=None)


def create_set_cuda_shm_regions(
    input_list: Sequence[Any],
    output_list: Sequence[tuple[str, int]],
    shm_region_names: Sequence[str] | None,
    shm_region_byte_sizes: Sequence[int] | None,
    triton_client: Any,
    protocol: str,
    *,
    device_id: int = 0,
    cuda: CudaAccess | None = None,
) -> ShmRegions:
    """Make regions as :func:`create_set_shm_regions` does, but in the memory of a GPU; all writes are complete there.

    An array may also lie on a GPU already, if it has ``__dlpack__``; strings lie there as bytes. The GPU must have the
    same ``device_id`` in this process and in the server. MachineError without a driver, a GPU, or free memory there.
    """
    access = cuda or CudaAccess()
    return _create(
        input_list,
        output_list,
        shm_region_names,
        shm_region_byte_sizes,
        triton_client,
        protocol,
        make=lambda name, byte_size: CudaShmHandle(name, byte_size, device_id, access),
        cuda=access,
    )


@overload
def unregister_cleanup_shm_regions(
    shm_handles: Iterable[ShmHandle | None], triton_client: Any, protocol: str
) -> None: ...
@overload
def unregister_cleanup_shm_regions(
    shm_regions: Sequence[str],
    shm_handles: Sequence[Any],
    precreated_shm_regions: Sequence[Any] | None,
    outputs: Collection[str],
    use_system_shared_memory: bool,
    use_cuda_shared_memory: bool,
) -> None: ...
def unregister_cleanup_shm_regions(*arguments: Any, **named: Any) -> None:
    """Unregister each region by its name, and free its memory. No request may still use a region.

    From Triton 24.12 on, the server does not show such requests. The function skips None, and regions that are
    unregistered, destroyed or unknown to the server, so you can call it again. A failure does not stop the rest, and is
    raised at the end; a wrong argument is a ValueError before anything is done. A region on a GPU that cannot be
    unregistered keeps its memory, which the server may have mapped: call it again, or :func:`cleanup_shm_regions` when
    the server has ended. With the six arguments of the original in Triton's tests, it does the same.
    """
    is_original = len(arguments) + len(named) > _OWN_ARGUMENTS_TO_CLEAN_UP
    (upstream_calls.unregister_cleanup_regions if is_original else _unregister_cleanup)(*arguments, **named)


def cleanup_shm_regions(shm_handles: Iterable[ShmHandle | None]) -> None:
    """Free the memory of regions, as :func:`unregister_cleanup_shm_regions` does, without asking the server.

    Registrations at the server stay, and system memory keeps its bytes, until they are unregistered or the server
    ends. Unregister regions on GPUs before, or end the server: otherwise CUDA leaves the effect undefined.
    It raises like that function.
    """
    _do_all([handle.destroy for handle in _those_made(shm_handles)])


def _create(
    input_list: Sequence[Any],
    output_list: Sequence[tuple[str, int]],
    shm_region_names: Sequence[str] | None,
    shm_region_byte_sizes: Sequence[int] | None,
    triton_client: Any,
    protocol: str,
    *,
    make: Callable[[str, int], ShmHandle],
    cuda: CudaAccess | None,
) -> ShmRegions:
    inputs, outputs = given_inputs(input_list, cuda), output_rooms(output_list)
    module = _module_of(protocol, triton_client)
    regions = ShmRegions([], [], [])
    try:
        for room in region_rooms(inputs, outputs, shm_region_names, shm_region_byte_sizes):
            regions.shm_handles.append(make(*room))
        in_handles, out_handles = regions.shm_handles[: len(inputs)], regions.shm_handles[len(inputs) :]
        for given, handle in zip(inputs, in_handles, strict=True):
            handle.write(given.data)
        for handle in regions.shm_handles:
            handle.register(triton_client)
        regions.inputs.extend(map(functools.partial(_input, module), inputs, in_handles))
        regions.outputs.extend(map(functools.partial(_output, module), outputs, out_handles))
    except BaseException:
        with contextlib.suppress(Exception):  # keep the first error, which says why
            _unregister_cleanup(regions.shm_handles, triton_client, protocol)
        raise
    return regions


def _unregister_cleanup(shm_handles: Iterable[ShmHandle | None], triton_client: Any, protocol: str) -> None:
    _module_of(protocol, triton_client)
    handles = _those_made(shm_handles)
    unregistering = [functools.partial(handle.unregister, triton_client) for handle in handles]
    _do_all([*unregistering, *[handle.destroy_unless_needed for handle in handles]])


def _input(module: Any, tensor: GivenInput, handle: ShmHandle) -> Any:
    described = module.InferInput(tensor.name, list(tensor.shape), tensor.dtype.name)
    if tensor.byte_size:
        described.set_shared_memory(handle.name, tensor.byte_size)
    else:  # Triton refuses a reference to no bytes
        described.set_data_from_numpy(np.empty(tensor.shape, triton_to_np_dtype(tensor.dtype.name)))
    return described


def _output(module: Any, tensor: Room, handle: ShmHandle) -> Any:
    described = module.InferRequestedOutput(tensor.name)
    described.set_shared_memory(handle.name, tensor.byte_size)
    return described


def _module_of(protocol: str, client: Any) -> Any:
    """Return tritonclient's module for a protocol, if the client may be of it."""
    if protocol not in _PROTOCOLS:
        raise ValueError(f"protocol is {protocol!r}; expected 'grpc' or 'http'")
    package, _, rest = type(client).__module__.partition(".")
    if package == "tritonclient" and rest.partition(".")[0] != protocol:
        raise ValueError(
            f"protocol is {protocol!r}, but the client is of {type(client).__module__}; expected one for both"
        )
    if inspect.iscoroutinefunction(getattr(client, "register_system_shared_memory", None)):
        raise ValueError("the client is an asyncio client; expected a blocking one")
    return importlib.import_module(f"tritonclient.{protocol}")


def _those_made(shm_handles: Iterable[ShmHandle | None]) -> list[ShmHandle]:
    handles = [handle for handle in shm_handles if handle is not None]
    for handle in handles:
        if not isinstance(handle, ShmHandle):
            raise ValueError(  # noqa: TRY004  # as every other wrong argument
                f"shm_handles holds an object of type {type(handle).__name__}; expected the handles that were returned"
            )
    return handles


def _do_all(steps: Sequence[Callable[[], object]]) -> None:
    """Do every step, even if others fail; then raise the first error."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
