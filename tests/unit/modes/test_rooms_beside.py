"""A client gives its stream's frames more room while the stream goes on: in a region that it lends, or in none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.model import ShmSession, StreamCall
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim, NamedRegionClaim
from shm_backend_utils.protocol.frame_table import encode_rooms
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table, frame_number
from shm_backend_utils.protocol.table import encode
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.claims_of import claim_of_region
from tests.unit.emulated import answers_to, delivered, message_of, outputs_of
from tests.unit.modes.doubling import FP32, MakeClient, Open, X
from tests.unit.sessions import tensor
from tests.unit.table_client import Client

COUNT = 100
LARGE = np.arange(COUNT, dtype=np.float32)
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


@pytest.fixture
def client() -> Iterator[Client]:
    """It has a ring of one place, in which a frame has room for X."""
    client = Client(slots=2)
    yield client
    client.close()


@pytest.fixture
def other() -> Iterator[Client]:
    """A further region of the same client."""
    other = Client(share=1 << 20)
    yield other
    other.close()


def begun(client: Client) -> InferenceRequest:
    return client.request({"X": X}, {"Y": X.nbytes}, ring=Ring(1, 1, 1024))


def rooms(other: Client, byte_size: int = LARGE.nbytes, offset: int = 0) -> dict[str, OutputSpan]:
    return {"Y": OutputSpan(1, other.data + offset, byte_size)}


def give(client: Client, table: bytes, index: int, generation: int = 1) -> None:
    """Write the table of the place's frames, as a client that has got frame ``index`` last; and release that."""
    record = client.region.record(1)
    record.give_room(table, frame_number(generation, index))
    record.generation = frame_number(generation, index)


def served(session: ShmSession, request: InferenceRequest, give_each: list[Callable[[], object]]) -> list[Any]:
    """Send one large frame more than there are things that the client does after each; return what was sent."""

    def answer(call: StreamCall) -> Iterator[None]:
        for do in [*give_each, None]:
            call.output("Y", LARGE.shape, LARGE.dtype).numpy()[:] = LARGE
            yield
            if do is not None:
                do()

    session.serve_streams([request], answer)
    return answers_to(request).sent


def place(client: Client, other: Client) -> results.OutputPlace:
    """Return where the frame that came last lies."""
    sizes = [each.region.header.byte_size for each in (client, other)]
    (found,) = results.decode(client.region.record(1).copy_results(), sizes).outputs
    return found


def in_response(sent: list[Any]) -> list[bool]:
    return [bool(outputs_of(each)) for each in sent if each is not None]


def test_a_frame_lies_where_its_client_has_given_it_room(open_session: Open, client: Client, other: Client) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other, offset=512))
    sent = served(open_session(**DECOUPLED), begun(client), [lambda: give(client, table, 0)])
    assert in_response(sent) == [True, False]
    found = place(client, other)
    assert (found.region, found.offset, found.shape) == (1, other.data + 512, (COUNT,))
    written = np.ndarray(found.shape, np.float32, other.region.bytes(), found.offset)
    assert written.tolist() == LARGE.tolist()
    assert client.is_over()
    assert other.is_free()


def test_what_a_table_does_not_move_stays_in_the_ring(open_session: Open, client: Client, other: Client) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    request = client.request({"X": X}, {"Y": 16, "Z": 16}, ring=Ring(1, 1, 1024))

    def answer(call: StreamCall) -> Iterator[None]:
        for _ in range(2):
            call.put("Y", LARGE)
            call.put("Z", X)
            yield
            give(client, table, 0)

    session = open_session(outputs=[tensor("Y"), tensor("Z")], **DECOUPLED)
    session.serve_streams([request], answer)
    sizes = [each.region.header.byte_size for each in (client, other)]
    found = results.decode(client.region.record(1).copy_results(), sizes).outputs
    assert {each.name: each.region for each in found} == {"Y": 1, "Z": 0}


def test_a_stream_grows_again_and_gives_the_last_region_back(open_session: Open, client: Client, other: Client) -> None:
    third = Client(share=1 << 20)
    seen: list[bool] = []

    def grow_again() -> None:
        seen.append(other.is_free())
        give(client, encode_rooms(claim_of_region(third.region), rooms(third)), 1)

    def look() -> None:
        seen.extend([other.is_free(), third.is_free()])
        client.region.record(1).generation = frame_number(1, 2)

    small = encode_rooms(claim_of_region(other.region), rooms(other, 200))
    sent = served(open_session(**DECOUPLED), begun(client), [lambda: give(client, small, 0), grow_again, look])
    assert in_response(sent) == [True, True, False, False]
    assert seen == [False, True, False]
    assert third.is_free()
    third.close()


def test_a_region_is_borrowed_once_for_all_places(open_session: Open, other: Client, make_client: MakeClient) -> None:
    client = make_client(slots=5)
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(1, 4, 1024))

    def answer(call: StreamCall) -> Iterator[None]:
        for index in range(12):
            call.put("Y", LARGE)
            yield
            for place in range(4) if index == 0 else [index % 4]:
                record = client.region.record(1 + place)
                if index < 4:
                    spans = rooms(other, offset=place * 512)
                    record.give_room(encode_rooms(claim_of_region(other.region), spans), frame_number(1, 0))
                if index >= place:
                    record.generation = frame_number(1, index)

    session = open_session(**DECOUPLED)
    session.serve_streams([request], answer)
    assert in_response(answers_to(request).sent) == [True] + [False] * 11
    assert other.is_free()


@pytest.mark.parametrize("word", [0, 7, frame_number(1, 1), frame_number(2, 0), frame_number(0, 9), 2**64 - 1])
def test_words_that_are_no_number_of_a_response_that_was_sent_mean_nothing(
    open_session: Open, client: Client, other: Client, word: int
) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other))

    def write() -> None:
        client.region.record(1).give_room(table, word)
        client.region.record(1).generation = frame_number(1, 0)

    sent = served(open_session(**DECOUPLED), begun(client), [write])
    assert in_response(sent) == [True, True]


def test_a_table_of_an_earlier_stream_means_nothing(open_session: Open, client: Client, other: Client) -> None:
    session = open_session(**DECOUPLED)
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    assert in_response(served(session, begun(client), [lambda: give(client, table, 0)])) == [True, False]

    def release() -> None:
        client.region.record(1).generation = frame_number(2, 0)

    assert in_response(served(session, begun(client), [release])) == [True, True]


def claim(other: Client, **changes: Any) -> LentRegionClaim:
    return claim_of_region(other.region, **changes)


def inside(other: Client, **changes: Any) -> bytes:
    return encode_rooms(claim(other), {"Y": rooms(other)["Y"]._replace(**changes)})


def of(*parts: Any) -> bytes:
    return encode(Table(*parts))


def torn(table: bytes, at: int, form: str, value: int) -> bytes:
    """Return a table with another value at an offset of the record."""
    changed = bytearray(table)
    struct.pack_into(form, changed, at - 8, value)
    return bytes(changed)


LIES: dict[str, tuple[Callable[[Client], bytes], str]] = {
    "beyond its region": (lambda other: inside(other, byte_size=1 << 21), "shm:table: frame.outputs"),
    "over the record": (lambda other: inside(other, offset=0), "shm:table: frame.outputs.Y"),
    "offset that wraps": (lambda other: inside(other, offset=2**64 - 400), "shm:table: frame.outputs"),
    "odd offset": (lambda other: inside(other, offset=other.data + 2), "shm:table: frame.outputs.Y.offset"),
    "size of the region": (
        lambda other: encode_rooms(claim(other, byte_size=1 << 30), rooms(other)),
        "shm:table: frame.regions[1].byte_size",
    ),
    "slot": (lambda other: encode_rooms(claim(other, slot=1), rooms(other)), "shm:table: frame.regions[1]"),
    "token": (lambda other: encode_rooms(claim(other, token="0" * 32), rooms(other)), "shm:refused: "),
    "key": (lambda other: encode_rooms(claim(other, key="shmbu-nothing"), rooms(other)), "shm:gone: "),
    "a name that the model lacks": (
        lambda other: encode_rooms(claim(other), {"NO": rooms(other)["Y"]}),
        "shm:tensor: model 'm' has no output 'NO'",
    ),
    "in the ring's region": (lambda other: inside(other, region=0), "shm:table: frame.outputs.Y.region"),
    "in a region that is not there": (lambda other: inside(other, region=2), "shm:table: frame.outputs"),
    "outputs that overlap": (
        lambda other: encode_rooms(claim(other), {**rooms(other), "Z": rooms(other)["Y"]}),
        "shm:table: frame.outputs.",
    ),
    "no region": (lambda other: of({}, {}), "shm:table: frame.region_count"),
    "two regions": (
        lambda other: of({}, rooms(other), (claim(other), claim(other, key="shmbu-other"))),
        "shm:table: frame.region_count",
    ),
    "more regions than there may be": (
        lambda other: torn(inside(other), 16, "<H", 65),
        "shm:table: frame.region_count",
    ),
    "a registered region": (
        lambda other: of({}, {"Y": OutputSpan(1, 0, 400)}, (NamedRegionClaim("mine"),)),
        "shm:table: frame.regions[1].kind",
    ),
    "a GPU": (
        lambda other: of({}, {"Y": OutputSpan(1, 0, 400)}, (CudaRegionClaim(bytes(64), 400, "0" * 32, 0),)),
        "shm:table: frame.regions[1].kind",
    ),
    "an input": (
        lambda other: of({"X": InputSpan(FP32, (4,), 1, other.data, 16)}, {}, (claim(other),)),
        "shm:table: frame.input_count",
    ),
    "a ring": (lambda other: of({}, rooms(other), (claim(other),), Ring(1, 1, 1024)), "shm:table: frame."),
    "length": (lambda other: torn(inside(other), 8, "<I", 2048), "shm:table: frame.length"),
    "nothing": (lambda other: bytes(200), "shm:table: frame.length"),
    "counts": (lambda other: torn(inside(other), 14, "<H", 0xFFFF), "shm:table: frame.input_count and output_count"),
    "a torn name": (lambda other: torn(inside(other), 40, "<Q", 2**63), "shm:table: frame."),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_ends_its_stream_alone(open_session: Open, client: Client, other: Client, lie: str) -> None:
    make, said = LIES[lie]
    session = open_session(outputs=[tensor("Y"), tensor("Z")], **DECOUPLED)
    before = other.region.bytes().copy()
    table = make(other)
    sent = served(session, begun(client), [lambda: give(client, table, 0)])
    assert in_response(sent[:1]) == [True]
    assert len(sent) == 2
    assert message_of(sent[1]).startswith(said)
    assert other.region.segment.key not in message_of(sent[1])
    assert (other.region.bytes() == before).all()
    assert client.is_over()
    assert other.is_free()
    good = encode_rooms(claim(other), rooms(other))
    assert in_response(served(session, begun(client), [lambda: give(client, good, 0, 2)])) == [True, False]


def test_the_streams_own_region_is_none_beside_it(open_session: Open, client: Client) -> None:
    span = {"Y": OutputSpan(1, client.data, 400)}
    table = encode_rooms(claim_of_region(client.region), span)
    sent = served(open_session(**DECOUPLED), begun(client), [lambda: give(client, table, 0)])
    assert message_of(sent[-1]).startswith("shm:table: frame.regions[1]: found memory that the request names before")


def test_a_stream_with_further_regions_gets_no_more_room(open_session: Open, client: Client, other: Client) -> None:
    third = Client()
    said = client.laid_out({"X": X}, {"Y": 16}, regions=(claim_of_region(third.region),), ring=Ring(1, 1, 1024))
    request = delivered(client.begin(said), ["Y"])
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    sent = served(open_session(**DECOUPLED), request, [lambda: give(client, table, 0)])
    assert message_of(sent[-1]).startswith("shm:table: frame.region_count: found 1, expected 0")
    third.close()


def test_who_has_given_the_stream_up_gets_nothing_written(open_session: Open, client: Client, other: Client) -> None:
    """Afterwards it may have taken the region back, and use it for something else."""
    table = encode_rooms(claim_of_region(other.region), rooms(other))

    def give_up() -> None:
        client.region.record(0).generation = 2
        assert other.is_free()
        give(client, table, 0)

    before = other.region.bytes().copy()
    sent = served(open_session(**DECOUPLED), begun(client), [give_up])
    assert message_of(sent[-1]).startswith("shm:stale: ")
    assert (other.region.bytes() == before).all()
    assert other.is_free()


def test_what_the_client_is_just_taking_back_is_not_borrowed(open_session: Open, client: Client, other: Client) -> None:
    lease = other.region.lease(0)
    assert lease.take_back()
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    sent = served(open_session(**DECOUPLED), begun(client), [lambda: give(client, table, 0)])
    assert message_of(sent[-1]).startswith("shm:stale: ")
    lease.give_back()


def test_a_model_that_may_not_map_so_much_goes_on_as_before(open_session: Open, client: Client, other: Client) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    session = open_session(parameters={"SHM_MAX_MAPPED_BYTES": str(1 << 18)}, **DECOUPLED)

    def release() -> None:
        client.region.record(1).generation = frame_number(1, 1)

    sent = served(session, begun(client), [lambda: give(client, table, 0), release])
    assert in_response(sent) == [True, True, True]
    assert sent[-1] is None


def test_a_table_is_looked_at_once(open_session: Open, client: Client, other: Client) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other))

    def spoil() -> None:
        client.region.record(1).table[:64] = bytes(64)
        client.region.record(1).generation = frame_number(1, 1)

    sent = served(open_session(**DECOUPLED), begun(client), [lambda: give(client, table, 0), spoil])
    assert in_response(sent) == [True, False, False]


def test_what_is_not_written_beside_the_ring_is_found_too(open_session: Open, client: Client, other: Client) -> None:
    table = encode_rooms(claim_of_region(other.region), rooms(other))
    request = begun(client)

    def answer(call: StreamCall) -> Iterator[None]:
        for count in (COUNT, COUNT - 1):
            call.output("Y", LARGE.shape, LARGE.dtype).numpy()[:count] = 1
            yield
            give(client, table, 0)

    open_session(parameters={"SHM_DEBUG": "true"}, **DECOUPLED).serve_streams([request], answer)
    (first, last) = answers_to(request).sent
    assert first is not None
    assert first.error() is None
    assert last is not None
    assert "has not written 1 of its 100 elements" in message_of(last)
    assert other.is_free()
