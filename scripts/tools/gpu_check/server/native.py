"""Triton's own CUDA shared memory, as tritonclient and ``compat.shm_util`` make it, and ``attach`` describes it."""

from __future__ import annotations

import base64
import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator, Mapping
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
from shm_backend_utils.protocol import named
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

from ..machine import used_bytes
from ..report import Amounts, CheckFailedError, NotOnAFakeError, Report, identity_figures, medians_ms, name_of, require
from .client import ServerCheck, ServerClient

COUNT: Final = 2**19
_DEVICE: Final = 0

_NUMBERS: Final = np.arange(COUNT, dtype=np.float32)
_WORDS: Final = np.array([b"one", b"", "zwölf".encode()], object)


class Region(NamedTuple):
    """One region of CUDA shared memory, and the module that made it."""

    module: Any
    name: str
    handle: Any
    byte_size: int

    def raw_handle(self) -> bytes:
        """Return the IPC handle in base64."""
        raw: bytes = self.module.get_raw_handle(self.handle)
        return raw

    def fill(self, values: npt.NDArray[np.float32]) -> None:
        """Set the beginning."""
        self.module.set_shared_memory_region(self.handle, [values])

    def numbers(self) -> npt.NDArray[np.float32]:
        """Return what is in it."""
        values: npt.NDArray[np.float32] = self.module.get_contents_as_numpy(
            self.handle, np.float32, [self.byte_size // 4]
        )
        return values


@contextlib.contextmanager
def _region(client: ServerClient, byte_size: int) -> Iterator[Region]:
    try:
        module = client.gpu.import_cuda_shared_memory()
    except ImportError as error:
        raise CheckFailedError(f"tritonclient's CUDA shared memory cannot be used here: {error}") from None
    name = f"gpu-check-{secrets.token_hex(4)}"
    handle = module.create_shared_memory_region(name, byte_size, _DEVICE)
    try:
        yield Region(module, name, handle, byte_size)
    finally:
        module.destroy_shared_memory_region(handle)


@contextlib.contextmanager
def _only_a_gpu_is_taken(client: ServerClient) -> Iterator[None]:
    """Register memory in a block, which a server refuses where the GPU is a fake."""
    try:
        yield
    except InferenceServerException as error:
        if not client.gpu.is_fake:
            raise
        raise NotOnAFakeError(f"the server takes no memory of a fake GPU: {error}") from None


@contextlib.contextmanager
def _registered(client: ServerClient, byte_size: int) -> Iterator[Region]:
    with _region(client, byte_size) as region:
        with _only_a_gpu_is_taken(client):
            client.bare.register_cuda_shared_memory(region.name, region.raw_handle(), _DEVICE, byte_size)
        try:
            yield region
        finally:
            client.bare.unregister_cuda_shared_memory(region.name)


def _infer(client: ServerClient, model: str, x: Region, y: Region) -> None:
    given = grpcclient.InferInput("INPUT0", [x.byte_size // 4], "FP32")
    given.set_shared_memory(x.name, x.byte_size)
    wanted = grpcclient.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory(y.name, y.byte_size)
    client.bare.infer(model, [given], outputs=[wanted])


def _native_request(client: ServerClient) -> str:
    with _registered(client, _NUMBERS.nbytes) as x, _registered(client, _NUMBERS.nbytes) as y:
        x.fill(_NUMBERS)
        _infer(client, client.model("quick"), x, y)
        require(bool((y.numbers() == client.gpu.kernels.after_quick(_NUMBERS)).all()), "the output is wrong")
    return ""


def _raw_region(client: ServerClient) -> str:
    size = _NUMBERS.nbytes
    region = client.after_server.enter_context(_region(client, 2 * size))
    region.fill(_NUMBERS)
    claim = CudaRegionClaim(
        base64.b64decode(region.raw_handle()), 2 * size, client.gpu.runtime.device_uuid(_DEVICE), None
    )
    inputs = {"INPUT0": InputSpan(BY_NAME["FP32"], _NUMBERS.shape, 1, 0, size)}
    model = client.model("quick")
    text = named.encode_descriptor(model, Table(inputs, {"OUTPUT0": OutputSpan(1, size, size)}, (claim,)))
    client.bare.infer(model, [], parameters={named.PARAMETER: text})
    require(bool((region.numbers()[COUNT:] == client.gpu.kernels.after_quick(_NUMBERS)).all()), "the output is wrong")
    return f"a descriptor of {len(text)} bytes"


CHECKS: Final[Mapping[str, ServerCheck]] = {
    "a model serves Triton's own CUDA shared memory": _native_request,
    "memory that tritonclient has made goes directly, by its handle": _raw_region,
}


def measure_identity(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    """Measure what identity takes on Triton's own path."""
    with contextlib.ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": client.infer_nothing}
        for size in amounts.identity_bytes:
            x, y = (stack.enter_context(_registered(client, size)) for _ in range(2))
            cases[name_of(size)] = lambda x=x, y=y: _infer(client, "gpu_identity", x, y)  # type: ignore[misc]
        medians = medians_ms(cases, amounts.slow_rounds)
    what = "identity by Triton's own CUDA shared memory"
    return report.measured(*identity_figures(group, what, medians, amounts.identity_bytes, is_held=False, binds=False))


@contextlib.contextmanager
def _regions(client: ServerClient, inputs: list[Any], outputs: list[tuple[str, int]]) -> Iterator[ShmRegions]:
    used = _used_bytes(client)
    access = client.gpu.access
    with _only_a_gpu_is_taken(client):
        try:
            regions = create_set_cuda_shm_regions(inputs, outputs, None, None, client.bare, "grpc", cuda=access)
        except InferenceServerException:
            require(_used_bytes(client) <= used, "what could not be registered was not freed")
            raise
    try:
        yield regions
    finally:
        unregister_cleanup_shm_regions(regions.shm_handles, client.bare, "grpc")


def _used_bytes(client: ServerClient) -> int:
    """Return how much memory is in use when all is freed that can be."""
    while client.gpu.runtime.retired.collect():
        client.gpu.runtime.synchronize_device(0)
    return used_bytes(client.gpu.runtime, 0)


def _request(client: ServerClient, numbers: Any) -> str:
    with _regions(client, [("INPUT0", numbers)], [("OUTPUT0", _NUMBERS.nbytes)]) as regions:
        client.bare.infer(client.model("quick"), regions.inputs, outputs=regions.outputs)
        doubled = regions.shm_handles[1].read(np.float32, _NUMBERS.shape)
    require(bool((doubled == client.gpu.kernels.after_quick(_NUMBERS)).all()), "the output is wrong")
    known = client.bare.get_cuda_shared_memory_status().regions
    require(not {"input0", "output0"} & set(known), "the server still knows the regions")
    return ""


def _from_the_gpu(client: ServerClient) -> str:
    tensor = client.gpu.kernels.tensor(_NUMBERS.size, 0)
    client.gpu.upload(client.gpu.described(tensor), _NUMBERS)
    return _request(client, tensor)


def _strings(client: ServerClient) -> str:
    with _regions(client, [("WORDS", _WORDS)], []) as regions:
        read = regions.shm_handles[0].read(object, _WORDS.shape)
    require(read.tolist() == _WORDS.tolist(), "the strings are wrong")
    return ""


def _attached(client: ServerClient) -> str:
    handles = [CudaShmHandle(name, _NUMBERS.nbytes, 0, client.gpu.access) for name in ("in", "out")]
    client.after_server.callback(cleanup_shm_regions, handles)
    handles[0].write(_NUMBERS.view(np.uint8))
    x = grpcclient.InferInput("INPUT0", list(_NUMBERS.shape), "FP32")
    x.set_shared_memory("in", _NUMBERS.nbytes)
    y = grpcclient.InferRequestedOutput("OUTPUT0")
    y.set_shared_memory("out", _NUMBERS.nbytes)
    regions = {handle.name: handle.region for handle in handles}
    attached = attach(client.model("quick"), [x], [y], cuda_regions=regions, cuda=client.gpu.access)
    response = client.bare.infer(client.model("quick"), **attached)
    require(not response.get_response().outputs, "the output came with the response")
    doubled = handles[1].read(np.float32, _NUMBERS.shape)
    require(bool((doubled == client.gpu.kernels.after_quick(_NUMBERS)).all()), "the output is wrong")
    return ""


OF_SHM_UTIL: Final[Mapping[str, ServerCheck]] = {
    "shm_util's regions, filled from the host, serve a model and are gone then": functools.partial(
        _request, numbers=_NUMBERS
    ),
    "shm_util's regions, filled from the GPU, serve a model and are gone then": _from_the_gpu,
    "shm_util's regions are registered with strings in them": _strings,
    "regions that attach describes serve a model, and nothing travels": _attached,
}
