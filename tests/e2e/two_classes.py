"""A call of ``infer_shm``, and the two classes that can make it: triton-shm-client's, and the one that replaces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_shm_client

from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.server import EmbeddedServer

CLASSES: Final = {"theirs": triton_shm_client.TritonSHMClient, "ours": TritonSHMClient}


@dataclass(frozen=True)
class Declared:
    """A model, and how it is registered."""

    model: str
    inputs: Any
    outputs: Any
    max_batch_size: Any = 4
    pool_size: Any = 2

    def register(self, client: Any) -> None:
        client.register_shm_model(self.model, self.inputs, self.outputs, self.max_batch_size, self.pool_size)

    def but(self, **changes: Any) -> Declared:
        return replace(self, **changes)

    def reading(self, *outputs: Any) -> Declared:
        return replace(self, outputs=outputs)


@dataclass(frozen=True)
class Call:
    """What either class is asked."""

    declared: Declared
    inputs: Mapping[str, Any]
    named: Mapping[str, Any] = field(default_factory=dict)

    def made_by(self, kind: Any, server: EmbeddedServer) -> Any:
        with kind(server.grpc_url) as client:
            self.declared.register(client)
            return client.infer_shm(self.declared.model, self.inputs, **self.named)


def x_of(count: int, columns: int = 4) -> npt.NDArray[np.float32]:
    return np.arange(count * columns, dtype=np.float32).reshape(count, columns)


def _tensor(name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> tuple[str, Sequence[int], npt.DTypeLike]:
    return name, shape, dtype


ROWS: Final = Declared("rows", [_tensor("X", (4,), np.float32)], [_tensor("DOUBLED", (4,), np.float32)])
"""It has a ShmSession. A row that begins below zero fails its request."""

ORDINARY: Final = Declared(
    "ordinary",
    [_tensor("X", (4,), np.float32), _tensor("N", (1,), np.int64)],
    [_tensor("Y", (4,), np.float32), _tensor("SUM", (1,), np.int64)],
)
"""It has none. Y is X times N, SUM is N plus the rows of the request."""

LATE_WRITER: Final = Declared(
    "late_writer",
    [_tensor("VALUE_AND_DELAY_US", (), np.int64)],
    [_tensor("VALUES", (256,), np.int64)],
    max_batch_size=2,
)
"""Two rows, a value and a delay, make a request; the second half of the output is written after the delay."""

FACTS: Final = Declared("call_facts", [_tensor("X", (), np.float32)], [_tensor("FACTS", (4096,), np.uint8)], 1)
"""What a model knows of its request, as JSON and zeros. It has a ShmSession."""
