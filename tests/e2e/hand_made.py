"""Requests on the direct path by a second reading of the protocol, so that a test can break any part of them."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.layout import SlotRecord

STEP: Final = 4096
"""Bytes from one tensor to the next."""
FIRST_GENERATION: Final = 5
FP32: Final = 11
NO_FENCE: Final = 0xFFFF
_HEAD: Final = "QIHHHHHHQ"
_TENSOR: Final = "QQHBBHH"
_CLAIM: Final = "BBHHHQ"


def _packed(form: str, *values: int) -> bytes:
    """Pack integers, of which only the lowest bits count: -1 is the largest number there is."""
    bits = {"B": 8, "H": 16, "I": 32, "Q": 64}
    return struct.pack(f"<{form}", *[value % (1 << bits[kind]) for kind, value in zip(form, values, strict=True)])


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


@dataclass
class Tensor:
    """An input or an output of a table."""

    name: bytes
    offset: int
    byte_size: int
    region: int = 0
    datatype: int = 0
    shape: list[int] = field(default_factory=list)

    def packed(self) -> bytes:
        place = self.offset, self.byte_size, self.region
        head = _packed(_TENSOR, *place, self.datatype, len(self.shape), len(self.name), 0)
        return head + _packed("Q" * len(self.shape), *self.shape) + _padded(self.name)


@dataclass
class Claim:
    """A further region of a table: kind 1 is lent, 2 CUDA, 3 named, 4 CUDA by descriptor."""

    kind: int
    name: bytes
    byte_size: int = 0
    secret: bytes = bytes(16)

    def packed(self) -> bytes:
        head = _packed(_CLAIM, self.kind, 0, 0, NO_FENCE, len(self.name), self.byte_size)
        return head + self.secret + _padded(self.name)


@dataclass
class Table:
    """A table as it is written. Its length is that of the content, where not given."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    regions: list[Claim] = field(default_factory=list)
    frame_count: int = 0
    frame_slot: int = 0
    frame_stride: int = 0
    length: int | None = None

    def __getitem__(self, name: str) -> Tensor:
        return next(each for each in [*self.inputs, *self.outputs] if each.name == name.encode())

    def packed(self, generation: int) -> bytes:
        """Return the client's half of the record, as far as the table reaches."""
        tensors = [each.packed() for each in [*self.inputs, *self.outputs]]
        body = b"".join([*[each.packed() for each in self.regions], *tensors])
        head = (
            generation,
            struct.calcsize(f"<{_HEAD}") + len(body) if self.length is None else self.length,
            len(self.inputs),
            len(self.outputs),
            len(self.regions),
            self.frame_count,
            self.frame_slot,
            0,  # which asks for no report
            self.frame_stride,
        )
        return _packed(_HEAD, *head) + body


@dataclass
class Address:
    """The parts of ``shm_slot``."""

    model: str
    key: str
    token: str
    slot: int | str = 0
    version: int | str = 2

    def __str__(self) -> str:
        return f"{self.version}/{self.model}/{self.key}/{self.token}/{self.slot}"


class HandMade:
    """A region, and a valid table in its first slot, sent by plain tritonclient over gRPC or HTTP."""

    def __init__(
        self,
        url: str,
        model: str,
        inputs: Mapping[str, npt.NDArray[np.float32]],
        outputs: Mapping[str, int],
        *,
        slot_count: int = 1,
    ) -> None:
        self.region = ManagedRegion.create(8 * STEP, slot_count, record_byte_size=4096)
        self.recorded: int = FIRST_GENERATION
        self.generation: Any = FIRST_GENERATION
        self.parameters: dict[str, Any] = {}
        self.address = Address(model, self.region.segment.key, self.region.header.token.hex())
        self.url = url
        self.model = model
        self._clients: dict[str, Any] = {}
        places = iter(range(self.region.data_offset, self.region.header.byte_size, STEP))
        self.table = Table(
            [self._put(name, next(places), array) for name, array in inputs.items()],
            [Tensor(name.encode(), next(places), byte_size) for name, byte_size in outputs.items()],
        )

    @property
    def record(self) -> SlotRecord:
        return self.region.record(0)

    def infer(self, carriers: Sequence[Any] = ()) -> Any:
        """Write the table and send the request; return the response, or raise InferenceServerException."""
        self.write()
        return self.send(carriers)

    def next(self) -> None:
        """Let the next request be another one than the last."""
        self.recorded += 1
        self.generation = self.recorded

    def write(self) -> None:
        """Write the table to the record, as far as it fits."""
        data = self.table.packed(self.recorded)[: self.record.room]
        self.record.request[8 : len(data)] = data[8:]
        self.record.request[:8] = data[:8]

    def send(self, carriers: Sequence[Any] = (), *, url: str | None = None) -> Any:
        return self.client(url or self.url).infer(self.model, list(carriers), parameters=self.all_parameters())

    def stream(self, callback: Callable[[Any, Any], None]) -> None:
        """Write the table and send it to a decoupled model; responses are passed on as they come."""
        self.write()
        client = self.client(self.url)
        client.start_stream(callback)
        client.async_stream_infer(self.model, [], parameters=self.all_parameters(), enable_empty_final_response=True)

    def client(self, url: str) -> Any:
        if url not in self._clients:
            module: Any = tritonclient.http if url.startswith("http://") else tritonclient.grpc
            self._clients[url] = module.InferenceServerClient(url.removeprefix("http://"))
        return self._clients[url]

    def all_parameters(self) -> dict[str, Any]:
        return {"shm_slot": str(self.address), "shm_generation": self.generation, **self.parameters}

    def output(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        tensor = self.table[name]
        return self.array(tensor.offset, tensor.byte_size, dtype)

    def array(self, offset: int, byte_size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.region.bytes()[offset : offset + byte_size].copy().view(dtype)
        return array

    def content(self) -> bytes:
        """Return the whole region, but for the client's half of the slot's record."""
        everything = bytearray(self.region.bytes().tobytes())
        begin = self.region.record_offset(0)
        everything[begin : begin + self.record.room] = bytes(self.record.room)
        return bytes(everything)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients = {}
        self.region.segment.unlink()
        self.region.close()

    def _put(self, name: str, offset: int, array: npt.NDArray[np.float32]) -> Tensor:
        self.region.bytes()[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return Tensor(name.encode(), offset, array.nbytes, 0, FP32, list(array.shape))


@contextlib.contextmanager
def hand_made(*arguments: Any, **named: Any) -> Iterator[HandMade]:
    with contextlib.closing(HandMade(*arguments, **named)) as request:
        yield request
