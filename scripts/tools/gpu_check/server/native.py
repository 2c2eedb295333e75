"""Triton's own CUDA shared memory, as tritonclient and ``compat.shm_util`` make it, and ``attach`` describes it."""

from __future__ import annotations

import base64
import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.attach import attach
from shm_backend_utils.compat.shm_util import (
    CudaShmHandle,
    ShmRegions,
    cleanup_shm_regions,
    create_set_cuda_shm_regions,
    unregister_cleanup_shm_regions,
)
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.protocol import parameters
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

from ...figures import Figure
from ..gpu import used_bytes
from ..report import Amounts, CheckFailedError, NotOnAFakeError, identity_medians, require
from .client import COUNT, NUMBERS, TritonCheck, TritonClient, over_empty

_DEVICE: Final = 0
_WORDS: Final = np.array([b"one", b"", "zwölf".encode()], object)


class Region(NamedTuple):
    cuda: Any  # the module that made it
    name: str
    handle: Any
    byte_size: int

    def contents(self) -> Any:
        return self.cuda.get_contents_as_numpy(self.handle, np.float32, [self.byte_size // 4])


def _module(client: TritonClient) -> Any:
    if client.gpu.is_fake:  # tritonclient's needs CUDA's runtime library; this is as much of it as the check uses
        return SimpleNamespace(
            create_shared_memory_region=lambda name, size, device: CudaShmHandle(name, size, device, client.gpu.access),
            get_raw_handle=lambda handle: handle.region.raw_handle,
            set_shared_memory_region=lambda handle, values: handle.write(values[0]),
            get_contents_as_numpy=lambda handle, datatype, shape: handle.read(datatype, shape),
            destroy_shared_memory_region=CudaShmHandle.destroy,
        )
    try:
        from tritonclient.utils import cuda_shared_memory  # noqa: PLC0415  # needs more than tritonclient does
    except (ImportError, RuntimeError) as error:  # it lacks its Python bindings of CUDA
        raise CheckFailedError(f"tritonclient's CUDA shared memory cannot be used here: {error}") from None
    return cuda_shared_memory


@contextlib.contextmanager
def _region(client: TritonClient, byte_size: int) -> Iterator[Region]:
    module = _module(client)
    name = f"gpu-check-{secrets.token_hex(4)}"
    handle = module.create_shared_memory_region(name, byte_size, _DEVICE)
    try:
        yield Region(module, name, handle, byte_size)
    finally:
        module.destroy_shared_memory_region(handle)


@contextlib.contextmanager
def _only_a_gpu_is_taken(client: TritonClient) -> Iterator[None]:
    """Register memory in a block, which a server refuses where the GPU is a fake."""
    try:
        yield
    except InferenceServerException as error:
        if not client.gpu.is_fake:
            raise
        raise NotOnAFakeError(f"the server takes no memory of a fake GPU: {error}") from None


@contextlib.contextmanager
def _registered(client: TritonClient, byte_size: int) -> Iterator[Region]:
    with _region(client, byte_size) as region:
        with _only_a_gpu_is_taken(client):
            raw_handle = region.cuda.get_raw_handle(region.handle)
            client.bare.register_cuda_shared_memory(region.name, raw_handle, _DEVICE, byte_size)
        try:
            yield region
        finally:
            client.bare.unregister_cuda_shared_memory(region.name)


def _require_quick(client: TritonClient, found: npt.NDArray[Any]) -> None:
    require(bool((found == client.gpu.kernels.after_quick(NUMBERS)).all()), "the output is wrong")


def _tensors(x_region: str, y_region: str, byte_size: int) -> tuple[list[Any], list[Any]]:
    x, y = grpcclient.InferInput("INPUT0", [byte_size // 4], "FP32"), grpcclient.InferRequestedOutput("OUTPUT0")
    x.set_shared_memory(x_region, byte_size)
    y.set_shared_memory(y_region, byte_size)
    return [x], [y]


def _infer(client: TritonClient, model: str, x: Region, y: Region) -> None:
    inputs, outputs = _tensors(x.name, y.name, x.byte_size)
    client.bare.infer(model, inputs, outputs=outputs)


def _native_request(client: TritonClient) -> None:
    with _registered(client, NUMBERS.nbytes) as x, _registered(client, NUMBERS.nbytes) as y:
        x.cuda.set_shared_memory_region(x.handle, [NUMBERS])
        _infer(client, client.model("work"), x, y)
        _require_quick(client, y.contents())


def _raw_region(client: TritonClient) -> str:
    size = NUMBERS.nbytes
    region = client.after_server.enter_context(_region(client, 2 * size))
    region.cuda.set_shared_memory_region(region.handle, [NUMBERS])
    handle = base64.b64decode(region.cuda.get_raw_handle(region.handle))
    claim = CudaRegionClaim(handle, 2 * size, client.gpu.runtime.device_uuid(_DEVICE), None)
    inputs = {"INPUT0": InputSpan(BY_NAME["FP32"], NUMBERS.shape, 1, 0, size)}
    model = client.model("work")
    text = parameters.encode_descriptor(model, Table(inputs, {"OUTPUT0": OutputSpan(1, size, size)}, (claim,)))
    client.bare.infer(model, [], parameters={parameters.DESCRIPTOR_PARAMETER: text})
    _require_quick(client, region.contents()[COUNT:])
    return f"a descriptor of {len(text)} bytes"


def _identity(client: TritonClient, amounts: Amounts) -> list[Figure]:
    @contextlib.contextmanager
    def registered(byte_size: int) -> Iterator[tuple[Region, Region]]:
        with _registered(client, byte_size) as x, _registered(client, byte_size) as y:
            yield x, y

    def infer(regions: tuple[Region, Region]) -> None:
        _infer(client, client.model("work"), *regions)

    sizes = amounts.identity_bytes
    medians = identity_medians(registered, infer, sizes, amounts.slow_rounds, empty=client.infer_nothing)
    return over_empty("identity by Triton's own CUDA shared memory", medians)


@contextlib.contextmanager
def _regions(client: TritonClient, inputs: list[Any], outputs: list[tuple[str, int]]) -> Iterator[ShmRegions]:
    client.free_unused()
    used, access = used_bytes(client.gpu.runtime), client.gpu.access
    with _only_a_gpu_is_taken(client):
        try:
            regions = create_set_cuda_shm_regions(inputs, outputs, None, None, client.bare, "grpc", cuda=access)
        except InferenceServerException:
            client.free_unused()
            require(used_bytes(client.gpu.runtime) <= used, "what could not be registered was not freed")
            raise
    try:
        yield regions
    finally:
        unregister_cleanup_shm_regions(regions.shm_handles, client.bare, "grpc")


def _request(client: TritonClient, numbers: Any) -> None:
    with _regions(client, [("INPUT0", numbers)], [("OUTPUT0", NUMBERS.nbytes)]) as regions:
        client.bare.infer(client.model("work"), regions.inputs, outputs=regions.outputs)
        found = regions.shm_handles[1].read(np.float32, NUMBERS.shape)
    _require_quick(client, found)
    known = client.bare.get_cuda_shared_memory_status().regions
    require(not {"input0", "output0"} & set(known), "the server still knows the regions")


def _from_the_gpu(client: TritonClient) -> None:
    _request(client, client.filled())


def _strings(client: TritonClient) -> None:
    with _regions(client, [("WORDS", _WORDS)], []) as regions:
        read = regions.shm_handles[0].read(object, _WORDS.shape)
    require(read.tolist() == _WORDS.tolist(), "the strings are wrong")


def _attached(client: TritonClient) -> None:
    handles = [CudaShmHandle(name, NUMBERS.nbytes, 0, client.gpu.access) for name in ("in", "out")]
    client.after_server.callback(cleanup_shm_regions, handles)
    handles[0].write(NUMBERS.view(np.uint8))
    tensors = _tensors("in", "out", NUMBERS.nbytes)
    regions = {handle.name: handle.region for handle in handles}
    attached = attach(client.model("work"), *tensors, cuda_regions=regions, cuda=client.gpu.access)
    response = client.bare.infer(client.model("work"), **attached)
    require(not response.get_response().outputs, "the output came with the response")
    _require_quick(client, handles[1].read(np.float32, NUMBERS.shape))


CHECKS: Final[Mapping[str, TritonCheck]] = {
    "a model serves Triton's own CUDA shared memory": _native_request,
    "memory that tritonclient has made goes directly, by its handle": _raw_region,
    "shm_util's regions, filled from the host, serve a model and are gone then": functools.partial(
        _request, numbers=NUMBERS
    ),
    "shm_util's regions, filled from the GPU, serve a model and are gone then": _from_the_gpu,
    "shm_util's regions are registered with strings in them": _strings,
    "regions that attach describes serve a model, and nothing travels": _attached,
}
MEASURES: Final[Mapping[str, Callable[[TritonClient, Amounts], list[Figure]]]] = {
    "identity on Triton's own path, by size": _identity
}
