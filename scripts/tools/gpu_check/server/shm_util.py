"""Regions of Triton's own CUDA shared memory, as ``compat.shm_util`` makes them and as ``attach`` describes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.compat.attach import attach
from shm_backend_utils.compat.shm_util import (
    CudaShmHandle,
    ShmRegions,
    cleanup_shm_regions,
    create_set_cuda_shm_regions,
    unregister_cleanup_shm_regions,
)

from ..machine import used_bytes
from ..report import NotOnAFakeError, require
from .client import ServerCheck, ServerClient

__all__ = ["CHECKS"]

_NUMBERS: Final = np.arange(2**19, dtype=np.float32)
_WORDS: Final = np.array([b"one", b"", "zwölf".encode()], object)


@contextlib.contextmanager
def _regions(client: ServerClient, inputs: list[Any], outputs: list[tuple[str, int]]) -> Iterator[ShmRegions]:
    used = _used_bytes(client)
    try:
        regions = create_set_cuda_shm_regions(inputs, outputs, None, None, client.bare, "grpc", cuda=client.gpu.access)
    except InferenceServerException as error:
        if not client.gpu.is_fake:
            raise
        require(_used_bytes(client) <= used, "what could not be registered was not freed")
        raise NotOnAFakeError(f"the server takes no memory of a fake GPU: {error}") from None
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


def _from_the_host(client: ServerClient) -> str:
    return _request(client, _NUMBERS)


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
    x = tritonclient.grpc.InferInput("INPUT0", list(_NUMBERS.shape), "FP32")
    x.set_shared_memory("in", _NUMBERS.nbytes)
    y = tritonclient.grpc.InferRequestedOutput("OUTPUT0")
    y.set_shared_memory("out", _NUMBERS.nbytes)
    regions = {handle.name: handle.region for handle in handles}
    attached = attach(client.model("quick"), [x], [y], cuda_regions=regions, cuda=client.gpu.access)
    response = client.bare.infer(client.model("quick"), **attached)
    require(not response.get_response().outputs, "the output came with the response")
    doubled = handles[1].read(np.float32, _NUMBERS.shape)
    require(bool((doubled == client.gpu.kernels.after_quick(_NUMBERS)).all()), "the output is wrong")
    return ""


CHECKS: Final[Mapping[str, ServerCheck]] = {
    "shm_util's regions, filled from the host, serve a model and are gone then": _from_the_host,
    "shm_util's regions, filled from the GPU, serve a model and are gone then": _from_the_gpu,
    "shm_util's regions are registered with strings in them": _strings,
    "regions that attach describes serve a model, and nothing travels": _attached,
}
