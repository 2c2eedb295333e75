"""Tables that break the protocol, or change while they are read: one error by a code, the same over gRPC and HTTP."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail, tells_404

from .flavours import url_of
from .hand_made import DATATYPES, STEP, Claim, HandMade, Tensor, hand_made

X: Final = np.array([1, 2, 3, 4], np.float32)
ROOM: Final = 64
REGION_SIZE: Final = 2 * 4096 + 8 * STEP
MORE: Final = 8192 + 4 * STEP
"""Where no tensor lies."""
UNKNOWN: Final = Tensor(b"Q", MORE, 16, datatype=DATATYPES["FP32"], shape=[4])

Break = Callable[[HandMade], None]


@contextlib.contextmanager
def valid(url: str, **options: Any) -> Iterator[HandMade]:
    """Make a valid request to a model that copies X to Y."""
    with hand_made(url, "repeat", {"X": X}, {"Y": ROOM}, **options) as request:
        request.parameters["times"] = 1
        yield request


def refusals_of(request: HandMade, server: EmbeddedServer, *carriers: Any) -> list[tuple[str, str]]:
    """Return status and text of a request's refusal over gRPC and HTTP; nothing is written, and nothing told."""
    request.write()
    before = request.content()
    found = []
    for protocol in ("grpc", "http"):
        with pytest.raises(InferenceServerException) as refusal:
            request.send(carriers, url=url_of(server, protocol))
        text = refusal.value.message()
        found.append((refusal.value.status(), text))
        for secret in (request.region.segment.key, request.region.header.token.hex()):
            assert secret not in text
        assert "/dev/shm/" not in text
        assert len(text) < 2100
    assert request.content() == before
    assert request.record.generation == request.recorded
    return found


def is_served(request: HandMade) -> bool:
    request.infer()
    return bool((request.output("Y", np.float32)[: X.size] == X).all())


@pytest.fixture
def made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    with valid(triton_server.grpc_url) as request:
        yield request


def setting(part: Callable[[HandMade], object], **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        changed = part(request)
        for field, value in fields.items():
            setattr(changed, field, value)

    return change


def head(**fields: Any) -> Break:
    return setting(lambda request: request.table, **fields)


def address(**fields: Any) -> Break:
    return setting(lambda request: request.address, **fields)


def tensor(which: str, **fields: Any) -> Break:
    return setting(lambda request: request.table[which], **fields)


def more(part: str, *found: object) -> Break:
    return lambda request: getattr(request.table, part).extend(found)


def claims(*found: Claim) -> Break:
    return more("regions", *found)


def own_region_as_a_lent_one(request: HandMade) -> None:
    region = request.region
    name, secret = region.segment.key.encode(), region.header.token
    request.table.regions.append(Claim(1, name, region.header.byte_size, secret, slot=0))


# One lie of each kind; the rest is told to a session, and to the decoder, in tests/unit. What is written there, the
# code, and what the text says of it.
LIES: Final[dict[str, tuple[Break, str, str]]] = {
    "length of some bytes more": (head(length=112), "shm:table", "length: found 112, expected 104, where the last of"),
    "one output too many": (head(output_count=2), "shm:table", "outputs[1]: found the table's end, expected a tensor"),
    "most regions": (head(region_count=65535), "shm:table", "region_count: found 65535, expected at most 64"),
    "input that begins in the record": (tensor("X", offset=8192 - 4), "shm:table", "inputs[0]"),
    "output one element beyond": (tensor("Y", offset=REGION_SIZE - 60), "shm:table", "outputs[0]: found 64 bytes"),
    "end that wraps around": (tensor("Y", offset=8192, byte_size=2**64 - 8192), "shm:table", "outputs[0]"),
    "size that is not the shape's": (tensor("X", byte_size=12), "shm:table", "inputs[0].byte_size: found 12"),
    "no element of a shape that no array has": (
        tensor("X", shape=[0, 2**62, 2**62], byte_size=0),
        "shm:table",
        "inputs[0].shape: found dimensions whose product has more than 63 bits",
    ),
    "rank of one more": (tensor("X", rank=33), "shm:table", "inputs[0]: found rank 33"),
    "data type 15": (tensor("X", datatype=15), "shm:table", "inputs[0].datatype: found 15"),
    "another data type": (tensor("X", datatype=DATATYPES["INT32"]), "shm:tensor", "'X' is INT32"),
    "flags of an output": (tensor("Y", flags=0x8000), "shm:table", "outputs[0]: found region 0, flags 32768"),
    "name that is no UTF-8": (tensor("X", name=b"\xff\xfe"), "shm:table", "inputs[0].name"),
    "name with a zero": (tensor("X", name=b"X\0"), "shm:tensor", "has no input 'X\\x00'"),
    "very long name": (tensor("X", name=b"X" * 1500), "shm:tensor", "has no input 'XXX"),
    "unknown input": (more("inputs", UNKNOWN), "shm:tensor", "has no input 'Q'; it has X"),
    "output twice": (more("outputs", Tensor(b"Y", MORE, 16)), "shm:table", "a name that occurs twice"),
    "output over an input": (tensor("Y", offset=8192), "shm:table", "outputs.Y: found bytes of another tensor"),
    "output at an odd address": (tensor("Y", offset=8192 + STEP + 1), "shm:table", "outputs.Y.offset: found 12289"),
    "a ring for one answer": (head(frame_count=1), "shm:table", "frame_count: found 1, expected 0: model"),
    "region of kind 5": (claims(Claim(5, b"", 4096)), "shm:table", "regions[1].kind: found 5"),
    "region that nobody registered": (claims(Claim(3, b"nobody's")), "shm:gone", 'regions[1] is "nobody'),
    "region that is named twice": (
        claims(Claim(3, b"a"), Claim(3, b"a")),
        "shm:table",
        "regions[2]: found a region that is named before",
    ),
    "lent region of nobody": (claims(Claim(1, b"shmbu-0-0", 4096)), "shm:gone", "regions[1] does not exist"),
    "lent region that climbs": (claims(Claim(1, b"shmbu-../../etc/passwd", 4096)), "shm:table", "regions[1].name"),
    "own region, lent": (own_region_as_a_lent_one, "shm:table", "regions[1]: found memory that the request names befo"),
    "fence that is a name": (
        claims(Claim(3, b"a"), Claim(2, bytes(64), 4096, fence=1)),
        "shm:table",
        "[2].fence: found",
    ),
    "wrong token": (address(token="0" * 32), "shm:refused", "shm_slot refused: the token is not the region's"),
    "no such slot": (address(slot=1), "shm:table", "shm_slot.slot: found 1, expected less than 1"),
    "slot in other digits": (address(slot="\u0660"), "shm:table", "shm_slot: found other text"),
    "key of nobody": (address(key="shmbu-0-nobody"), "shm:gone", "shm_slot does not exist"),
    "key that climbs": (address(key="shmbu-../../etc/passwd"), "shm:table", "shm_slot"),
    "version 1": (address(version=1), "shm:version", "found 1, expected 2, which this model's shm_backend_utils"),
}

STATUS: Final = {"shm:gone": ("StatusCode.NOT_FOUND", "404")}


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[tells_404] * (LIES[lie][1] in STATUS)) for lie in LIES])
def test_a_lie_is_refused_and_the_truth_is_served(made: HandMade, triton_server: EmbeddedServer, lie: str) -> None:
    change, code, field = LIES[lie]
    honest = copy.deepcopy(made.address), copy.deepcopy(made.table)
    change(made)
    refusals = refusals_of(made, triton_server)
    statuses, texts = zip(*refusals, strict=True)
    assert statuses == STATUS.get(code, ("StatusCode.INVALID_ARGUMENT", "400"))
    assert texts[0] == texts[1]
    assert code_in(texts[0]) == code
    assert field in texts[0]
    made.address, made.table = honest
    assert is_served(made)


@has_ensembles_that_fail
def test_a_lying_table_for_a_step_fails_the_ensemble_by_its_code(triton_server: EmbeddedServer) -> None:
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with hand_made(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.address.model = "adder"
        request.table["SUM"].offset = 0
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException) as refusal:
            request.send([x])
        assert code_in(refusal.value.message()) == "shm:table"
        assert "outputs[0]: found 16 bytes at offset 0" in refusal.value.message()
        assert request.content() == before
        request.table["SUM"].offset = 8192 + STEP
        request.infer([x])
        assert request.output("SUM", np.float32).tolist() == (11 * X).tolist()


def test_the_longest_name_is_told_as_far_as_an_error_goes(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        request.table["X"].name = "ß".encode() * 32_000
        (status, text), (_, over_http) = refusals_of(request, triton_server)
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text == over_http
        assert text.startswith("shm:tensor: model 'repeat' has no input 'ßßß")
        assert text.endswith("ßß … (cut)")


def test_a_generation_of_63_bits_is_served(made: HandMade) -> None:
    made.recorded = 2**63 - 2
    made.next()
    assert is_served(made)


class Rewriter(threading.Thread):
    """Writes the bytes of some tables, and noise, into a record in turn, a few bytes at a time, until it is ended."""

    def __init__(self, half: memoryview, tables: list[bytes]) -> None:
        super().__init__()
        self._half = half
        self._tables = [*tables * 5, random.Random(12).randbytes(len(tables[0]))]
        self._has_ended = threading.Event()

    def run(self) -> None:
        source = random.Random(12)
        while not self._has_ended.is_set():
            data = source.choice(self._tables)
            at = 0
            while at < len(data):
                end = min(len(data), at + source.choice([1, 7, 8, 24, 200]))
                self._half[8 + at : 8 + end] = data[at:end]
                at = end
        self._half.release()

    def end(self) -> None:
        self._has_ended.set()
        self.join()


def test_a_table_that_changes_while_it_is_copied_is_refused_or_answered_rightly(triton_server: EmbeddedServer) -> None:
    """Whatever the model has read, it answers that: rows of a ramp, wherever they begin and end."""
    ramp = np.arange(4 * STEP // 4, dtype=np.float32)
    with valid(triton_server.grpc_url, tensor_count=12) as request:
        begin = request.region.data_offset
        request.region.bytes()[begin : begin + ramp.nbytes] = ramp.view(np.uint8)
        tables = []
        for offset, count, room in ((begin, 4, begin + 4 * STEP), (begin + 512, 300, begin + 8 * STEP)):
            tensor("X", offset=offset, byte_size=4 * count, shape=[count])(request)
            tensor("Y", offset=room, byte_size=4 * count)(request)
            tables.append(request.table.packed(0)[8:])
        rewriter = Rewriter(request.record.request[:], tables)
        rewriter.start()
        try:
            lengths, codes = answers_of(request, 300)
        finally:
            rewriter.end()
        assert lengths >= {4, 300}
        assert codes
        assert codes <= {"shm:table", "shm:tensor", "shm:missing"}
        request.next()
        request.infer()
        assert request.output("Y", np.float32).tolist() == ramp[128:428].tolist()


def answers_of(request: HandMade, count: int) -> tuple[set[int], set[str]]:
    """Send requests, and check each answer; return how long answers were, and the codes of refusals."""
    lengths, codes = set(), set()
    for _ in range(count):
        request.next()
        request.record.generation = request.recorded
        try:
            response = request.send()
        except InferenceServerException as error:
            codes.add(code_in(error.message()))
            continue
        place = request.results()["Y"]
        written = request.array(place.offset, place.byte_size, np.float32)
        y = response.as_numpy("Y") if place.is_in_response else written
        assert place.shape == y.shape
        assert (np.diff(y) == 1).all()
        lengths.add(len(y))
    return lengths, codes
