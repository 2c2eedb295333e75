"""Ten thousand tables that nobody would write: each is answered rightly or refused by a code, and the model lives."""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any, Final

import numpy as np
from tritonclient.utils import InferenceServerException

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer

from .hand_made import STEP, Claim, HandMade, Table, Tensor, hand_made

COUNT: Final = 5_000
"""Of each of the two kinds."""
SEED: Final = 20

A: Final = np.arange(1, 9, dtype=np.float32)
B: Final = 100 * A
BEGIN: Final = 2 * 4096
END: Final = BEGIN + 4 * STEP

CODES: Final = {"shm:table", "shm:tensor", "shm:missing", "shm:gone", "shm:refused"}
OFFSETS: Final = (
    0,
    1,
    4,
    4095,
    4096,
    BEGIN - 4,
    BEGIN,
    BEGIN + 1,
    BEGIN + 4,
    BEGIN + STEP,
    END - 32,
    END - 4,
    END,
    2**63 - 1,
    2**64 - 1,
)
SIZES: Final = (0, 1, 4, 16, 32, 33, 64, STEP, END, 2**31, 2**32, 2**63 - 1, 2**64 - 1)
SMALL: Final = (0, 1, 2, 3, 7, 32, 33, 64, 65, 255, 256, 1023, 1024, 65535)
DIMENSIONS: Final = (0, 1, 2, 4, 8, 9, 2**31, 2**62, 2**63, 2**64 - 1)
NAMES: Final = (b"A", b"B", b"SUM", b"", b"C", b"A\0", b"\xff", "ß".encode() * 40, b"SHM")


def some_tensor(source: random.Random) -> Tensor:
    """Return one of which most fields are plausible."""
    tensor = Tensor(source.choice(NAMES[:3]), source.choice(OFFSETS[6:11]), 32, 0, 11, [8])
    for _ in range(source.choice((0, 0, 1, 2))):
        match source.randrange(8):
            case 0:
                tensor.name = source.choice(NAMES)
            case 1:
                tensor.offset = source.choice(OFFSETS)
            case 2:
                tensor.byte_size = source.choice(SIZES)
            case 3:
                tensor.region = source.choice(SMALL)
            case 4:
                tensor.datatype = source.choice(SMALL)
            case 5:
                tensor.shape = [source.choice(DIMENSIONS) for _ in range(source.choice((0, 1, 2, 3, 32, 33)))]
            case 6:
                tensor.flags, tensor.rank = source.choice(SMALL), source.choice((None, *SMALL))
            case _:
                tensor.name_length = source.choice(SMALL)
    return tensor


def some_output(source: random.Random) -> Tensor:
    tensor = some_tensor(source)
    if source.random() < 0.8:
        tensor.name, tensor.datatype, tensor.shape = b"SUM", 0, []
    return tensor


def some_claim(source: random.Random, own: Claim) -> Claim:
    name = source.choice((own.name, own.name, b"shmbu-0-0", b"nobody's", b"", bytes(64), b"\xff"))
    secret = source.choice((own.secret, bytes(16)))
    size = source.choice((own.byte_size, *SIZES))
    return Claim(
        source.choice((1, 1, 3, 0, 255)), name, size, secret, source.choice(SMALL), source.choice((0, 1, 2, 0xFFFF))
    )


def some_table(source: random.Random, own: Claim) -> Table:
    """Return a table whose parts may be anything."""
    table = Table(
        [some_tensor(source) for _ in range(source.choice((0, 1, 2, 2, 2, 3)))],
        [some_output(source) for _ in range(source.choice((0, 1, 1, 1, 2)))],
    )
    if source.random() < 0.1:
        table.regions = [some_claim(source, own) for _ in range(source.choice((1, 2)))]
    if source.random() < 0.1:
        count = source.choice(("length", "input_count", "output_count", "region_count", "reserved"))
        setattr(table, count, source.choice(SMALL))
    if source.random() < 0.05:
        table.frame_count, table.frame_slot = source.choice(SMALL), source.choice(SMALL)
        table.frame_stride = source.choice(SIZES)
    return table


def mutated(source: random.Random, data: bytes) -> bytes:
    """Return a valid table of which some bytes are others."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        at = source.randrange(len(changed))
        match source.randrange(4):
            case 0:
                changed[at] ^= 1 << source.randrange(8)
            case 1:
                changed[at] = source.randrange(256)
            case 2:
                at -= at % 8
                changed[at : at + 8] = struct.pack("<Q", source.choice(OFFSETS + SIZES))[: len(changed) - at]
            case _:
                other = source.randrange(len(changed))
                piece = changed[other : other + 24]
                changed[at : at + len(piece)] = piece
                del changed[len(data) :]
    return bytes(changed)


def test_ten_thousand_of_them(triton_server: EmbeddedServer) -> None:
    source = random.Random(SEED)
    seen: Counter[str] = Counter()
    with hand_made(triton_server.grpc_url, "adder", {"A": A, "B": B}, {"SUM": 64}, tensor_count=4) as request:
        region = request.region
        memory = region.bytes()
        honest = request.table
        valid = honest.packed(0)[8:]
        own = Claim(1, region.segment.key.encode(), region.header.byte_size, region.header.token)
        secrets = (region.segment.key, region.header.token.hex())
        # The model's results go there, and answers; nothing else is ever written to.
        head = memory[: region.record_offset(0)].tobytes()
        for index in range(2 * COUNT):
            request.next()
            if index % 2:
                request.patches = {8: mutated(source, valid)}
            else:
                request.table, request.patches = some_table(source, own), {}
            memory[BEGIN:] = 0
            memory[BEGIN : BEGIN + 32] = A.view(np.uint8)
            memory[BEGIN + STEP : BEGIN + STEP + 32] = B.view(np.uint8)
            request.write()
            before = memory[BEGIN:].copy()
            try:
                response = request.send()
            except InferenceServerException as error:
                text = error.message()
                seen[code_in(text) or text] += 1
                assert not [secret for secret in secrets if secret in text]
                assert len(text) < 2100
                assert (memory[BEGIN:] == before).all()
                assert request.record.started < request.recorded or code_in(text) == "shm:missing"
            else:
                seen["answered"] += 1
                check_answer(request, response, before)
            request.table = honest
            assert memory[: len(head)].tobytes() == head
        request.next()
        request.patches = {}
        request.infer()
        assert request.output("SUM", np.float32)[: A.size].tolist() == (A + B).tolist()
    assert set(seen) == {*CODES, "answered"}, seen
    assert seen["answered"] > COUNT // 20, seen


def check_answer(request: HandMade, response: Any, before: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """See that the model has answered what the table says, and written to nothing but the room for it.

    A second reading of the table tells where its inputs are.
    """
    data = bytes(request.record.request)
    spans = inputs_in(data)
    a, b = [
        before[offset - BEGIN : offset - BEGIN + size].view(np.float32).reshape(shape) for offset, size, shape in spans
    ]
    place = request.results()["SUM"]
    if place.is_in_response:
        found = response.as_numpy("SUM")
        begin = end = 0
    else:
        begin, end = place.offset - BEGIN, place.offset - BEGIN + place.byte_size
        found = request.array(place.offset, place.byte_size, np.float32).reshape(place.shape)
    np.testing.assert_array_equal(found, a + b)
    now = request.region.bytes()[BEGIN:]
    same = now == before
    same[begin:end] = True
    assert same.all()


def inputs_in(data: bytes) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return offset, size and shape of A and B in a table that a model took."""
    input_count, _, region_count = struct.unpack_from("<HHH", data, 12)
    assert region_count == 0 or input_count == 2
    at = 32
    for _ in range(region_count):
        (length,) = struct.unpack_from("<H", data, at + 6)
        at += 32 + length + -length % 8
    found = {}
    for _ in range(input_count):
        offset, size, _region, _datatype, rank, length, _flags = struct.unpack_from("<QQHBBHH", data, at)
        shape = struct.unpack_from(f"<{rank}Q", data, at + 24)
        begin = at + 24 + 8 * rank
        found[data[begin : begin + length]] = (offset, size, shape)
        at = begin + length + -length % 8
    return [found[b"A"], found[b"B"]]
