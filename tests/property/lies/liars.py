"""What lying peers say of outputs, and stand-ins for servers that say it by either protocol, and in memory."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.transports.http.codec import Answer
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import TableError
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol import layout, results, table
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import Table, frame_number
from tests.opened import open_region
from tests.property.random_tables import mutated
from tests.unit.fake_server import FakeServer
from tests.unit.fake_wires import FakeTransport


def _config(name: str, **more: Any) -> dict[str, Any]:
    outputs = {
        "NUMBERS": ("FP32", [-1, 1]),
        "GRID": ("INT64", [-1, 3]),
        "WORDS": ("STRING", [-1]),
        "FLAGS": ("BOOL", [2]),
    }
    return {
        "name": name,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": ["-1", "1"], "optional": True}],
        "output": [
            {"name": name, "data_type": f"TYPE_{datatype}", "dims": [str(size) for size in dims]}
            for name, (datatype, dims) in outputs.items()
        ],
        "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
        **more,
    }


CONFIGS: Final = (_config("m"), _config("frames", model_transaction_policy={"decoupled": True}))
SPEC: Final = ModelSpec.from_config(CONFIGS[0])
HINTS: Final = {"NUMBERS": 16, "GRID": 96, "WORDS": 64, "FLAGS": 2}
"""Room for the outputs: the first two have all that the truth takes, and so a place on every path."""


@dataclass(frozen=True)
class Said:
    """One output as an answer describes it, and the bytes that come with it."""

    name: Any
    datatype: Any
    shape: Any
    content: bytes


TRUTHS: Final = (
    Said("NUMBERS", "FP32", (4, 1), np.arange(4, dtype=np.float32).tobytes()),
    Said("GRID", "INT64", (4, 3), np.arange(12).tobytes()),
    Said("WORDS", "BYTES", (2,), b"\3\0\0\0abc\0\0\0\0"),
    Said("FLAGS", "BOOL", (2,), b"\0\1"),
)
_NAMES: Final = (*SPEC.outputs, "X", "SHM", "", "OUT9", "NUMBERS\0", "\U0001f4a5", "N" * 3000)
_DATATYPES: Final = (*BY_NAME, "", "FP128", "BYTES ", "bytes", "TYPE_FP32", "O", "object", "float32")
_SIZES: Final = (*range(-2, 6), 24, 255, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63))
OF_JSON: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 4.5, 1e300, float("nan"), 10**30),
    *("4", "", [], [[1]], ["x"], {}, {"a": 1}),
)
"""What JSON may have where something else is expected."""

_PREFIXES: Final = (0, 1, 3, 4, 5, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1)
_MOST_BYTES: Final = 1 << 20  # no output is so large here, whatever is said


def lies(chance: random.Random) -> list[Said]:
    """Return all outputs of an answer: most of them true, some left out, there twice, or in another order."""
    said = list(TRUTHS)
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        at = chance.randrange(len(said))
        said[at] = _lie(chance, said[at])
    if chance.random() < 0.1:
        chance.shuffle(said)
    if chance.random() < 0.05:
        said.append(_lie(chance, chance.choice(said)))
    if chance.random() < 0.05:
        said.pop(chance.randrange(len(said)))
    return said


def _lie(chance: random.Random, said: Said) -> Said:
    size = list(said.shape) or [0]
    size[chance.randrange(len(size))] = chance.choice(_SIZES)
    name, datatype = chance.choice(_NAMES), chance.choice(_DATATYPES)
    shape, content = _shape(chance), _content(chance, said.content)
    aimed = (
        replace(said, name=name),
        replace(said, datatype=datatype),
        replace(said, shape=shape),
        replace(said, shape=tuple(size)),
        replace(said, content=content),
        replace(said, datatype=datatype, content=content),
        replace(chance.choice(TRUTHS), name=said.name),
        Said(name, datatype, shape, content),
    )
    return chance.choice(aimed)


def _shape(chance: random.Random) -> tuple[int, ...]:
    rank = chance.choice((0, 1, 1, 1, 2, 2, 3, 4, 32, 33, 65, 300))
    if rank > 4:
        return (chance.choice((0, 1, 1, 2, -1)),) * rank
    return tuple(chance.choice(_SIZES) for _ in range(rank))


def _content(chance: random.Random, content: bytes) -> bytes:
    way = chance.randrange(5)
    if way == 0:
        return content[: chance.randrange(len(content) + 1)]
    if way == 1:
        return content + chance.randbytes(chance.randint(1, 64))
    if way == 2:
        return chance.randbytes(chance.randrange(65))
    lengths = [chance.choice(_PREFIXES) for _ in range(chance.randint(1, 3))]
    return b"".join(struct.pack("<I", length) + chance.randbytes(chance.randrange(6)) for length in lengths)


def random_text(chance: random.Random, texts: Sequence[str]) -> str:
    text = chance.choice(texts)
    return chance.choice((text, text, text[: chance.randrange(len(text) + 1)], text * 2))


def check_array(name: str, array: Any) -> None:
    """Raise AssertionError unless this is an output as the model's configuration has it. All of it is read."""
    expected = SPEC.outputs[name]
    assert expected.dtype is not None
    assert isinstance(array, np.ndarray), f"{name} is a {type(array)}"
    assert array.dtype == expected.dtype.numpy, f"{name} is {array.dtype}"
    assert array.ndim == len(expected.shape), f"{name} has shape {array.shape}"
    assert all(want in (-1, size) for size, want in zip(array.shape, expected.shape, strict=True)), array.shape
    assert array.nbytes <= _MOST_BYTES, f"{name} has {array.nbytes} bytes"
    if array.dtype.hasobject:
        assert all(type(each) is bytes for each in array.ravel().tolist()), f"{name} has {array.tolist()}"
    array.tobytes()


ERRORS: Final = (
    "shm:gone: the slot is gone",
    "shm:refused: the slot is another user's",
    "shm:stale: the request was given up",
    "shm:busy: the slot is in use",
    "shm:replayed: a second time",
    "shm:table: inputs: found 1, expected 2",
    "Unable to find shared memory region: 'shmbu-1-2'",
    "shared memory region 'shmbu-1-2' already in manager",
    "output 'NUMBERS': 4 bytes should be at least 16 bytes",
    "[request id: 7] in ensemble 'm', shm:gone: of another",
    "\x1b[31m\0\N{PILE OF POO}",
    "",
)
_STATUSES: Final = ("StatusCode.INTERNAL", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE", "400", "501", "", "\0")
_SIZES_OF_JSON: Final[tuple[Any, ...]] = (0, -1, 1, 3, 2**31, 2**63, 2**64, "7", None, 1.5, [])
_WORD: Final = 1 << 64
SHARE_OF_ERRORS: Final = 0.03
_MOST_MAPPED: Final = 8


class LyingTransport(FakeTransport):
    """Answers as a server, and lies to requests from when :attr:`is_lying` is set."""

    def __init__(self, protocol: str, chance: random.Random) -> None:
        self.server = FakeServer(*CONFIGS)
        super().__init__(self.server, protocol)
        self.is_lying = False
        self._is_http = protocol == "http"
        self._chance = chance
        self._slots = Slots()

    def send(self, message: Any, timeout_s: float) -> Any:
        is_request = message.path.endswith("/infer") if self._is_http else message.procedure == "ModelInfer"
        if not (is_request and self.is_lying):
            return super().send(message, timeout_s)
        named = _parameters_http(message) if self._is_http else _parameters_grpc(message)
        if SLOT_PARAMETER in named:
            self._slots.lie(self._chance, named[SLOT_PARAMETER], named[GENERATION_PARAMETER])
        if self._chance.random() < SHARE_OF_ERRORS:
            raise InferenceError(random_text(self._chance, ERRORS), self._chance.choice(_STATUSES))
        return lying_http(self._chance) if self._is_http else lying_grpc(self._chance)

    def stream(self, message: Any, timeout_s: float) -> Generator[Any, None, None]:
        named = _parameters_grpc(message)
        for index in range(1 << 20):
            if SLOT_PARAMETER in named:
                self._slots.lie(self._chance, named[SLOT_PARAMETER], named[GENERATION_PARAMETER], index)
            yield lying_grpc(self._chance)


class Slots:
    """The memory that requests name: mapped, and filled with lies about where outputs lie."""

    def __init__(self) -> None:
        self._mapped: dict[str, ManagedRegion] = {}

    def lie(self, chance: random.Random, address: str, generation: int, frame: int | None = None) -> None:
        """Write results that lie, of a request, or of one frame of its stream."""
        named = parse_address(address)
        region = self._mapped.get(named.key)
        if region is None:
            while len(self._mapped) >= _MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped))).close()
            region = self._mapped[named.key] = open_region(named.key, named.token)
        own = region.record(named.slot)
        record, stamp = own, generation
        found: Table | None = None
        with contextlib.suppress(TableError):  # it was scribbled over
            _, found = table.decode(bytes(own.request), region.data_offset, region.header.byte_size)
        if frame is not None and found is not None and found.ring is not None:
            record = region.record(found.ring.slot + frame % found.ring.frames)
            stamp = frame_number(generation, frame)
        said = _results(chance, found, region.header.byte_size)[: record.results_room]
        record.results[16 : 16 + len(said)] = said
        right = chance.random() < 0.95
        wrong = (0, generation - 1, generation + 1, _WORD - 1)
        record.model_words[0] = generation if right else chance.choice(wrong) % _WORD
        record.complete(stamp if right or chance.random() < 0.5 else chance.choice((0, stamp + 1, _WORD - 1)), b"")
        if chance.random() < 0.01:  # a model may write anywhere; the header is read when it is opened alone
            at = chance.randrange(layout.HEADER_LENGTH, region.header.byte_size - 8)
            region.bytes()[at : at + 8] = list(chance.randbytes(8))


def _results(chance: random.Random, found: Table | None, byte_size: int) -> bytes:
    """Return the results of a request, behind their stamps: near the truth for the most part."""
    way = chance.random()
    if way < 0.05:
        return chance.randbytes(chance.choice((8, 24, 200, 2032)))
    places = _true_places(found)
    if way < 0.5:
        honest = bytes(16) + results.encode(places)
        return mutated(chance, honest, 16, len(honest))[16:]
    said = lies(chance)
    told = []
    for each in said:
        place = next((place for place in places if place.name == each.name), chance.choice(places))
        offset, size, region, in_response = place.offset, place.byte_size, 0, place.is_in_response
        if chance.random() < 0.2:
            offset = chance.choice((0, 1, 64, 4096, byte_size, byte_size - 4, 2**63, _WORD - 8, _WORD - 1))
        if chance.random() < 0.2:
            size = chance.choice((0, 1, 4, 15, 17, byte_size, 2**62, _WORD - 1))
        if chance.random() < 0.1:
            region = chance.choice((0, 1, 2, 65535))
        if chance.random() < 0.1:
            in_response = not in_response
        told.append(_packed(each, offset, size, region, in_response))
    body = b"".join(told)
    events = chance.choice((0, 0, 0, 0, 0, 0, 0, 1, 3, 65535))
    length = 24 + len(body)
    return struct.pack("<IHH", length % 2**32, len(told), events) + body


def _true_places(found: Table | None) -> list[OutputPlace]:
    places = []
    for said in TRUTHS:
        room = None if found is None else found.outputs.get(said.name)
        has_room = room is not None and room.byte_size >= len(said.content)
        offset = room.offset if room is not None and has_room else 0
        size = len(said.content) if has_room else 0
        places.append(
            OutputPlace(said.name, BY_NAME[said.datatype], said.shape, 0, offset, size, is_in_response=not has_room)
        )
    return places


def _packed(said: Said, offset: int, byte_size: int, region: int, is_in_response: bool) -> bytes:
    """Return an output's description, whatever its numbers are."""
    name = said.name.encode()[:500]
    shape = [size % _WORD for size in said.shape[:200]]
    number = table.NUMBERS.get(said.datatype, 77)
    head: bytes = table.TENSOR.pack(offset, byte_size, region, number, len(shape) % 256, len(name), int(is_in_response))
    return b"".join((head, struct.pack(f"<{len(shape)}Q", *shape), name, bytes(-len(name) % 8)))


def lying_grpc(chance: random.Random) -> Any:
    answer = service_pb2.ModelInferResponse(model_name=random_text(chance, ("m", "")))
    for said in lies(chance):
        output = answer.outputs.add(name=said.name, datatype=said.datatype, shape=said.shape)
        way = chance.random()
        if way < 0.9:
            answer.raw_output_contents.append(said.content)
        elif way < 0.95:  # Triton's other form, which it never uses
            output.contents.fp32_contents.extend([1.0] * chance.randrange(4))
            output.contents.bytes_contents.extend([said.content] * chance.randrange(3))
        if chance.random() < 0.03:
            output.parameters["binary_data_size"].int64_param = chance.choice((0, -1, 4, 2**62))
    if chance.random() < 0.03:
        del answer.raw_output_contents[:]
    return answer


def lying_http(chance: random.Random) -> Answer:
    outputs: list[Any] = []
    contents = []
    for said in lies(chance):
        size: Any = chance.choice(_SIZES_OF_JSON) if chance.random() < 0.05 else len(said.content)
        described: dict[str, Any] = {
            "name": said.name,
            "datatype": said.datatype,
            "shape": list(said.shape),
            "parameters": {"binary_data_size": size},
        }
        if chance.random() < 0.1:
            described[chance.choice((*described, "data"))] = chance.choice(OF_JSON)
        if chance.random() < 0.05:
            del described[chance.choice(list(described))]
        if chance.random() < 0.05:  # in the JSON itself
            described.pop("parameters", None)
            count = min(abs(math.prod(said.shape)), 8)
            described["data"] = chance.choice((OF_JSON, ["x"] * count, [1e39] * count, [[1], [2, 3]], [-1] * count))
        outputs.append(described if chance.random() > 0.01 else chance.choice(OF_JSON))
        contents.append(said.content)
    head: Any = {"model_name": "m", "outputs": outputs}
    if chance.random() < 0.02:
        head[chance.choice(list(head))] = chance.choice(OF_JSON)
    if chance.random() < 0.01:
        head = chance.choice(OF_JSON)
    text = json.dumps(head).encode()
    if chance.random() < 0.02:
        text = mutated(chance, text, 0, len(text))
    size = len(text) if chance.random() > 0.03 else chance.choice((*_SIZES_OF_JSON, len(text) - 1, len(text) + 9))
    headers = {} if chance.random() < 0.02 else {b"Inference-Header-Content-Length": str(size).encode()}
    if chance.random() < 0.02:
        headers[b"Content-Encoding"] = chance.choice((b"gzip", b"deflate", b"br", b""))
    return Answer(200, headers, text + b"".join(contents))


def _parameters_grpc(message: Any) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.request.parameters.items()
    }


def _parameters_http(message: Any) -> dict[str, Any]:
    length = int(message.headers["Inference-Header-Content-Length"])
    found: dict[str, Any] = json.loads(b"".join(message.body)[:length]).get("parameters", {})
    return found
