"""Memory for requests by Triton's own shared memory: a region for the input, and one for the output."""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import shared_memory

from shm_backend_utils.cli.common.registered_regions import registered_region

from .payloads import Floats

__all__ = ["RegisteredPair"]


class RegisteredPair:
    """Two regions that a server has registered: for an input, and for an output that is as large.

    Parameters
    ----------
    stack : ExitStack or AsyncExitStack
        Removes them when it ends.
    plain : object
        tritonclient's client, which blocks. A client that is awaited may send the requests.
    protocol : str
    most_bytes : int
        How large an input can be.

    Attributes
    ----------
    inputs, outputs : list
        For tritonclient's ``infer``: what was filled in last.
    """

    def __init__(self, stack: ExitStack | AsyncExitStack, plain: Any, protocol: str, most_bytes: int) -> None:
        name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
        self._source = registered_region(stack, plain, f"{name}-in", most_bytes)
        self._target = registered_region(stack, plain, f"{name}-out", most_bytes)
        triton = tritonclient.grpc if protocol == "grpc" else tritonclient.http
        self.inputs = [triton.InferInput("INPUT0", [0], "FP32")]
        self.outputs = [triton.InferRequestedOutput("OUTPUT0")]

    def fill(self, x: Floats) -> None:
        """Copy the next request's input."""
        shared_memory.set_shared_memory_region(self._source.handle, [x])
        self.inputs[0].set_shape(list(x.shape))
        self.inputs[0].set_shared_memory(self._source.name, x.nbytes)
        self.outputs[0].set_shared_memory(self._target.name, x.nbytes)

    def received(self, shape: tuple[int, ...]) -> Floats:
        """Return the output, which is not copied."""
        array: Floats = shared_memory.get_contents_as_numpy(self._target.handle, np.float32, shape)
        return array
