"""Every limit of a table on a real server: what is at it is read, what is beyond it is refused, and its field named.

What is read is served, or refused for what it says, by another code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer

from .flavours import url_of
from .hand_made import DATATYPES, Claim, HandMade, Tensor
from .hand_made import hand_made as made_for

X: Final = np.array([1, 2, 3, 4], np.float32)
ROOM: Final = 64
RECORD: Final = 1 << 20
HALF: Final = RECORD // 2
BEGIN: Final = 4096 + RECORD

Break = Callable[[HandMade], None]


@pytest.fixture(params=["grpc", "http"])
def made(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[HandMade]:
    """A valid request to a model that copies X to Y, in a record of the largest size."""
    url = url_of(triton_server, request.param)
    with made_for(url, "repeat", {"X": X}, {"Y": ROOM}, record_byte_size=RECORD) as made:
        made.parameters["times"] = 1
        yield made


def outcome(made: HandMade) -> tuple[str, str]:
    """Send the request; return the code and the text of its refusal, or nothing if the answer is right.

    A refusal leaves everything as it was.
    """
    made.next()
    made.write()
    before = made.content()
    try:
        made.send()
    except InferenceServerException as error:
        text = str(error.message())
        if code_in(text) != "shm:missing":  # which the model itself finds out
            assert made.content() == before
        return code_in(text), text
    assert made.output("Y", np.float32)[: X.size].tolist() == X.tolist()
    return "", ""


def x(**fields: object) -> Break:
    def change(made: HandMade) -> None:
        for field, value in fields.items():
            setattr(made.table["X"], field, value)

    return change


def y(**fields: object) -> Break:
    def change(made: HandMade) -> None:
        for field, value in fields.items():
            setattr(made.table["Y"], field, value)

    return change


def end_of_region(made: HandMade) -> int:
    return made.region.header.byte_size


def tensors(count: int) -> Break:
    def change(made: HandMade) -> None:
        made.table.outputs += [Tensor(f"Y{number}".encode(), BEGIN, 0) for number in range(count - 2)]

    return change


def regions(count: int) -> Break:
    def change(made: HandMade) -> None:
        made.table.regions += [Claim(3, f"nobody's {number}".encode()) for number in range(count)]

    return change


def rank(count: int) -> Break:
    return x(shape=[1] * (count - 1) + [4])


def lent(byte_size: int) -> Break:
    return lambda made: made.table.regions.append(Claim(1, b"shmbu-0-0", byte_size))


def probe(value: int) -> Break:
    return lambda made: setattr(made.table, "probe", value)


def flags_of_region(value: int) -> Break:
    return lambda made: made.table.regions.append(Claim(3, b"nobody's", reserved=value))


def filled_record(excess: int) -> Break:
    """Have the table end that many bytes behind the record's first half."""

    def change(made: HandMade) -> None:
        made.table.outputs.append(Tensor(b"", BEGIN, 0))
        while (missing := HALF + excess - len(made.table.packed(0))) > 0:
            made.table.outputs[-1].name += b"n" * min(missing, 65_528 - len(made.table.outputs[-1].name))
            if len(made.table.outputs[-1].name) == 65_528 and missing > 65_528:
                made.table.outputs.append(Tensor(b"%d" % len(made.table.outputs), BEGIN, 0))

    return change


def key(length: int) -> Break:
    return lambda made: setattr(made.address, "key", "shmbu-" + "0" * length)


def at_end(which: str, size: int, excess: int) -> Break:
    """Have a tensor end that many bytes behind the region."""

    def change(made: HandMade) -> None:
        tensor = made.table[which]
        tensor.offset, tensor.byte_size = end_of_region(made) - size + excess, size
        if which == "X":
            tensor.shape = [size // 4]
            made.region.bytes()[-size:] = X.view(np.uint8)

    return change


# Of each: what is at the limit, the code that it gets, what is beyond, and what the refusal says.
LIMITS: Final[dict[str, tuple[Break, str, Break, str]]] = {
    "tensors": (tensors(512), "shm:tensor", tensors(513), "input_count and output_count: found 513 tensors"),
    "regions": (regions(64), "shm:gone", regions(65), "region_count: found 65, expected at most 64"),
    "dimensions": (rank(32), "shm:tensor", rank(33), "inputs[0]: found rank 33"),
    "data types": (
        x(datatype=14, shape=[8]),
        "shm:tensor",
        x(datatype=15),
        "inputs[0].datatype: found 15, expected 1 to 14",
    ),
    "first data type": (x(datatype=1, shape=[16]), "shm:tensor", x(datatype=0), "inputs[0].datatype: found 0"),
    "name": (x(name=b"n" * 65_535), "shm:tensor", x(name_length=65_535), "inputs[0]: found rank 1 and a name of 65535"),
    "length of a record": (filled_record(0), "shm:tensor", filled_record(8), f"length: found {HALF + 8}"),
    "key": (key(64), "shm:gone", key(65), "shm_slot: found other text"),
    "size of a lent region": (
        lent(2**63 - 1),
        "shm:gone",
        lent(2**63),
        "regions[1].byte_size: found 92233720368547758",
    ),
    "least size of a lent region": (lent(1), "shm:gone", lent(0), "regions[1].byte_size: found 0"),
    "probe": (probe(0), "", probe(3), "probe: found 3, expected 0"),
    "flags of a region": (flags_of_region(0), "shm:gone", flags_of_region(1), "regions[1].flags: found 1"),
    "begin of an input": (x(offset=BEGIN), "", x(offset=BEGIN - 4), "inputs[0]: found 16 bytes at offset"),
    "begin of an output": (y(offset=BEGIN + ROOM), "", y(offset=BEGIN - 4), "outputs[0]: found 64 bytes at offset"),
    "end of an input": (at_end("X", 16, 0), "", at_end("X", 16, 4), "inputs[0]: found 16 bytes at offset"),
    "end of an output": (at_end("Y", 16, 0), "", at_end("Y", 16, 4), "outputs[0]: found 16 bytes at offset"),
    "an output beside an input": (y(offset=BEGIN + 16), "", y(offset=BEGIN + 12), "outputs.Y: found bytes of another"),
    "address of an input": (x(offset=BEGIN), "", x(offset=BEGIN + 2), "inputs.X.offset: found"),
    "address of an output": (y(offset=BEGIN + 20), "", y(offset=BEGIN + 21), "outputs.Y.offset: found"),
    "flags of an input": (x(flags=0), "", x(flags=1), "inputs[0]: found region 0, flags 1"),
    "number of a region": (x(region=0), "", x(region=1), "inputs[0]: found region 1"),
    "empty output": (at_end("Y", 0, 0), "too small", at_end("Y", 0, 1), "outputs[0]: found 0 bytes at offset"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_at_a_limit_is_read(made: HandMade, limit: str) -> None:
    change, code, _, _ = LIMITS[limit]
    change(made)
    if code == "too small":  # the answer comes with the response
        made.next()
        assert made.infer().as_numpy("Y").tolist() == X.tolist()
    else:
        assert outcome(made)[0] == code


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_beyond_a_limit_is_refused_by_its_field(made: HandMade, limit: str) -> None:
    _, _, change, field = LIMITS[limit]
    change(made)
    code, text = outcome(made)
    assert (code, text.startswith(f"shm:table: {field}")) == ("shm:table", True), text


def test_a_generation_of_63_bits_is_served(made: HandMade) -> None:
    made.recorded = 2**63 - 2
    assert outcome(made) == ("", "")


@contextlib.contextmanager
def lender_region(made: HandMade) -> Iterator[tuple[ManagedRegion, Claim]]:
    """Make a second region of this process, and the claim by which the request names it."""
    region = ManagedRegion.create(4096, 2)
    claim = Claim(1, region.segment.key.encode(), region.header.byte_size, region.header.token, slot=1)
    made.table.regions.append(claim)
    try:
        yield region, claim
    finally:
        region.segment.unlink()
        region.close()


def test_the_last_slot_of_a_lent_region_is_lent(made: HandMade) -> None:
    with lender_region(made):
        assert outcome(made) == ("", "")


LENT_LIES: Final[dict[str, tuple[dict[str, object], str, str]]] = {
    "slot": ({"slot": 2}, "shm:table", "regions[1].slot: found 2, expected less than 2"),
    "largest slot": ({"slot": 65_535}, "shm:table", "regions[1].slot: found 65535"),
    "size": ({"byte_size": 4096}, "shm:table", "regions[1].byte_size: found 4096"),
    "token": ({"secret": bytes(16)}, "shm:refused", "regions[1]"),
}


@pytest.mark.parametrize("lie", LENT_LIES)
def test_what_a_lent_region_is_not_is_refused(made: HandMade, lie: str) -> None:
    fields, code, text = LENT_LIES[lie]
    with lender_region(made) as (_, claim):
        for field, value in fields.items():
            setattr(claim, field, value)
        found, said = outcome(made)
        assert found == code
        assert text in said


def test_a_tensor_in_the_records_of_a_lent_region_is_refused(made: HandMade) -> None:
    with lender_region(made) as (region, _):
        x(region=1, offset=region.data_offset - 16)(made)
        code, text = outcome(made)
        assert code == "shm:table"
        assert text.startswith("shm:table: inputs.X: found 16 bytes at offset ")


def test_outputs_that_overlap_in_a_lent_region_are_refused(made: HandMade) -> None:
    with lender_region(made) as (region, _):
        x(region=1, offset=region.data_offset)(made)
        y(region=1, offset=region.data_offset + 12)(made)
        assert outcome(made)[1].startswith("shm:table: outputs.Y: found bytes of another tensor")


def test_the_largest_shape_of_no_element_is_refused_and_a_small_one_served(made: HandMade) -> None:
    x(shape=[2**64 - 1, 0], byte_size=0)(made)
    assert outcome(made)[1].startswith("shm:table: inputs[0].shape: found dimensions whose product")


def test_strings_need_room_for_their_lengths(made: HandMade) -> None:
    x(datatype=DATATYPES["BYTES"], shape=[5])(made)
    assert outcome(made)[1].startswith("shm:table: inputs[0].byte_size: found 16")
