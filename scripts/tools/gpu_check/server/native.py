"""Triton's own CUDA shared memory, made by tritonclient: beside the direct path, and on it."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.protocol import named
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table

from ..report import Amounts, CheckFailedError, NotOnAFakeError, Report, identity_figures, medians_ms, name_of, require
from .client import ServerCheck, ServerClient

__all__ = ["CHECKS", "measure"]

COUNT: Final = 2**19
_DEVICE: Final = 0


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
def _registered(client: ServerClient, byte_size: int) -> Iterator[Region]:
    with _region(client, byte_size) as region:
        try:
            client.bare.register_cuda_shared_memory(region.name, region.raw_handle(), _DEVICE, byte_size)
        except InferenceServerException as error:
            if not client.gpu.is_fake:
                raise
            raise NotOnAFakeError(f"the server takes no memory of a fake GPU: {error}") from None
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
    numbers = np.arange(COUNT, dtype=np.float32)
    with _registered(client, numbers.nbytes) as x, _registered(client, numbers.nbytes) as y:
        x.fill(numbers)
        _infer(client, client.model("quick"), x, y)
        require(bool((y.numbers() == client.gpu.kernels.after_quick(numbers)).all()), "the output is wrong")
    return ""


def _raw_region(client: ServerClient) -> str:
    numbers = np.arange(COUNT, dtype=np.float32)
    size = numbers.nbytes
    region = client.after_server.enter_context(_region(client, 2 * size))
    region.fill(numbers)
    claim = CudaRegionClaim(
        base64.b64decode(region.raw_handle()), 2 * size, client.gpu.runtime.device_uuid(_DEVICE), None
    )
    inputs = {"INPUT0": InputSpan(BY_NAME["FP32"], numbers.shape, 1, 0, size)}
    model = client.model("quick")
    text = named.encode_descriptor(model, Table(inputs, {"OUTPUT0": OutputSpan(1, size, size)}, (claim,)))
    client.bare.infer(model, [], parameters={named.PARAMETER: text})
    require(bool((region.numbers()[COUNT:] == client.gpu.kernels.after_quick(numbers)).all()), "the output is wrong")
    return f"a descriptor of {len(text)} bytes"


CHECKS: Final[Mapping[str, ServerCheck]] = {
    "a model serves Triton's own CUDA shared memory": _native_request,
    "memory that tritonclient has made goes directly, by its handle": _raw_region,
}


def measure(report: Report, group: str, client: ServerClient, amounts: Amounts) -> None:
    """Measure what identity takes on Triton's own path."""
    report.run(group, "identity on Triton's own path, by size", lambda: _measure(report, group, client, amounts))


def _measure(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    with contextlib.ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": client.infer_nothing}
        for size in amounts.identity_bytes:
            x, y = (stack.enter_context(_registered(client, size)) for _ in range(2))
            cases[name_of(size)] = lambda x=x, y=y: _infer(client, "gpu_identity", x, y)  # type: ignore[misc]
        medians = medians_ms(cases, amounts.slow_rounds)
    what = "identity by Triton's own CUDA shared memory"
    return report.measured(*identity_figures(group, what, medians, amounts.identity_bytes, is_held=False, binds=False))
