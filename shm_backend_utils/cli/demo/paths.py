"""The ways that a photograph can take to the model and back, all over gRPC and all in one shape.

``place`` puts a photograph where its path wants it; the request that it returns can be made again and again, and is
what is timed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import shared_memory

from ...client import ShmClient
from ..common.registered_regions import registered_region
from .photographs import Photograph

__all__ = ["PATHS", "DirectPath", "EmptyRequest", "InlinePath", "Request", "RequestPath", "TritonShmPath"]

MODEL: Final = "image_resize_normalize"
OUTPUT_SHAPE: Final = (3, 224, 224)
OUTPUT_NBYTES: Final = 3 * 224 * 224 * 4
TIMEOUT_S: Final = 30.0

Request = Callable[[], npt.NDArray[np.float32]]
"""Makes one request and returns the normalized photograph."""


class RequestPath(ABC):
    """One way to the model and back. A context manager, which removes what it put anywhere."""

    name: str
    copies: str  # of the tensors' data, between the client's memory and the model's

    def __init__(self, url: str) -> None:
        self._cleanup = contextlib.ExitStack()
        self._open(url)

    @abstractmethod
    def place(self, photograph: Photograph) -> Request:
        """Put a photograph in place and return the request for it."""

    @abstractmethod
    def _open(self, url: str) -> None: ...

    def __enter__(self) -> RequestPath:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()


class DirectPath(RequestPath):
    """Our client: the model reads the photograph and writes its output where the client has them."""

    name = "direct"
    copies = "0 in, 0 out"

    def place(self, photograph: Photograph) -> Request:
        """Fill a prepared call."""
        shapes = {"IMAGE": (photograph.shape, photograph.dtype)}
        call = self._cleanup.enter_context(self._client.prepare(MODEL, shapes))
        call.inputs["IMAGE"][:] = photograph
        return lambda: call.infer(timeout_s=TIMEOUT_S)["NORMALIZED"]

    def _open(self, url: str) -> None:
        self._client = self._cleanup.enter_context(ShmClient(url))


class TritonShmPath(RequestPath):
    """Plain tritonclient with Triton's own shared memory, registered once."""

    name = "triton-shm"
    copies = "1 in, 2 out"

    def place(self, photograph: Photograph) -> Request:
        """Fill a region, and make one for the output."""
        name = f"demo-{os.getpid()}-{secrets.token_hex(4)}"
        source = registered_region(self._cleanup, self._client, f"{name}-in", photograph.nbytes)
        sink = registered_region(self._cleanup, self._client, f"{name}-out", OUTPUT_NBYTES)
        shared_memory.set_shared_memory_region(source.handle, [photograph])
        image = grpcclient.InferInput("IMAGE", photograph.shape, "UINT8")
        image.set_shared_memory(source.name, photograph.nbytes)
        normalized = grpcclient.InferRequestedOutput("NORMALIZED")
        normalized.set_shared_memory(sink.name, OUTPUT_NBYTES)

        def request() -> npt.NDArray[np.float32]:
            self._client.infer(MODEL, [image], outputs=[normalized], client_timeout=TIMEOUT_S)
            view: npt.NDArray[np.float32] = shared_memory.get_contents_as_numpy(sink.handle, np.float32, OUTPUT_SHAPE)
            return view

        return request

    def _open(self, url: str) -> None:
        self._client = self._cleanup.enter_context(grpcclient.InferenceServerClient(url))


class InlinePath(RequestPath):
    """Plain tritonclient, with the tensors in the messages."""

    name = "inline"
    copies = "several"

    def place(self, photograph: Photograph) -> Request:
        """Do nothing: there is no place but the message, so filling that is part of the request."""

        def request() -> npt.NDArray[np.float32]:
            image = grpcclient.InferInput("IMAGE", photograph.shape, "UINT8")
            image.set_data_from_numpy(photograph)
            result = self._client.infer(MODEL, [image], client_timeout=TIMEOUT_S)
            array: npt.NDArray[np.float32] = result.as_numpy("NORMALIZED")
            return array

        return request

    def _open(self, url: str) -> None:
        self._client = self._cleanup.enter_context(grpcclient.InferenceServerClient(url))


class EmptyRequest(RequestPath):
    """What any request costs: a tensor of no elements, to the model that does nothing."""

    # Plain tritonclient on purpose: with our client, the floor would rise with every microsecond that we waste, and
    # `direct` would look the better for it.

    name = "empty"
    copies = "none"

    def place(self, photograph: Photograph) -> Request:
        """Ignore the photograph."""
        nothing = grpcclient.InferInput("INPUT0", [0], "FP32")
        nothing.set_data_from_numpy(np.empty(0, np.float32))

        def request() -> npt.NDArray[np.float32]:
            result = self._client.infer("identity", [nothing], client_timeout=TIMEOUT_S)
            array: npt.NDArray[np.float32] = result.as_numpy("OUTPUT0")
            return array

        return request

    def _open(self, url: str) -> None:
        self._client = self._cleanup.enter_context(grpcclient.InferenceServerClient(url))


PATHS: Final[tuple[type[RequestPath], ...]] = (DirectPath, TritonShmPath, InlinePath, EmptyRequest)
