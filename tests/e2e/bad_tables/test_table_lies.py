"""A table that breaks the protocol: one clear error by a code, the same over gRPC and HTTP.

Nothing is written then, no secret is told, and the next request is served.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import tells_404

from ..hand_made import DATATYPES, STEP, Claim, HandMade, Tensor
from .breaks import REGION_SIZE, Break, is_served, one_more_input, refusals_of, tensor

MOST: Final = 2**63 - 1
LARGEST: Final = 2**64 - 1


def head(**fields: Any) -> Break:
    def change(request: HandMade) -> None:
        for field, value in fields.items():
            setattr(request.table, field, value)

    return change


def address(**fields: Any) -> Break:
    def change(request: HandMade) -> None:
        for field, value in fields.items():
            setattr(request.address, field, value)

    return change


def claims(*found: Claim) -> Break:
    return lambda request: request.table.regions.extend(found)


def one_more_output(name: bytes, **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        request.table.outputs.append(Tensor(name, **{"offset": 8192 + 4 * STEP, "byte_size": 16, **fields}))

    return change


def own_region_as_a_lent_one(request: HandMade) -> None:
    region = request.region
    name, secret = region.segment.key.encode(), region.header.token
    request.table.regions.append(Claim(1, name, region.header.byte_size, secret, slot=0))


# What is written there, the code, and what the text says of it.
LIES: Final[dict[str, tuple[Break, str, str]]] = {
    "length 0": (head(length=0), "shm:table", "length: found 0, expected 32 to 2048"),
    "length of the head": (head(length=32), "shm:table", "inputs[0]: found the table's end"),
    "length of one byte less": (head(length=32 + 40 + 24), "shm:table", "outputs[0]"),
    "length of some bytes more": (head(length=112), "shm:table", "length: found 112, expected 104, where the last of"),
    "length of the record": (head(length=2048), "shm:table", "length: found 2048, expected 104"),
    "length beyond the record": (head(length=2049), "shm:table", "length: found 2049"),
    "largest length": (head(length=-1), "shm:table", "length: found 4294967295"),
    "one input too many": (head(input_count=3), "shm:table", "inputs[1].datatype: found 0, expected 1 to 14"),
    "most inputs": (head(input_count=65535), "shm:table", "found 65536 tensors, expected at most 512"),
    "one output too many": (head(output_count=2), "shm:table", "outputs[1]: found the table's end, expected a tensor"),
    "most outputs": (head(output_count=65535), "shm:table", "found 65536 tensors, expected at most 512"),
    "one input less": (head(input_count=0, output_count=2), "shm:table", "outputs[0]: found a data type or a shape"),
    "a region that is not there": (head(region_count=1), "shm:table", "regions[1]"),
    "most regions": (head(region_count=65535), "shm:table", "region_count: found 65535, expected at most 64"),
    "input in the header": (tensor("X", offset=0), "shm:table", "inputs[0]: found 16 bytes at offset 0"),
    "input in the record": (tensor("X", offset=4096), "shm:table", "inputs[0]"),
    "input that begins in the record": (tensor("X", offset=8192 - 4), "shm:table", "inputs[0]"),
    "output in the header": (tensor("Y", offset=0), "shm:table", "outputs[0]: found 64 bytes at offset 0"),
    "output in the record": (tensor("Y", offset=4096 + 2048), "shm:table", "outputs[0]"),
    "output that begins in the record": (tensor("Y", offset=8192 - 16), "shm:table", "outputs[0]"),
    "empty output in the record": (tensor("Y", offset=8191, byte_size=0), "shm:table", "outputs[0]"),
    "input one byte beyond": (tensor("X", offset=REGION_SIZE - 15), "shm:table", "inputs[0]: found 16 bytes"),
    "output one element beyond": (tensor("Y", offset=REGION_SIZE - 60), "shm:table", "outputs[0]: found 64 bytes"),
    "output behind the end": (tensor("Y", offset=REGION_SIZE + 4096), "shm:table", "outputs[0]"),
    "empty output behind the end": (tensor("Y", offset=REGION_SIZE + 1, byte_size=0), "shm:table", "outputs[0]"),
    "largest offset": (tensor("X", offset=LARGEST), "shm:table", "inputs[0]"),
    "offset of 63 bits": (tensor("Y", offset=MOST), "shm:table", "outputs[0]"),
    "largest size": (tensor("Y", byte_size=LARGEST), "shm:table", "outputs[0]"),
    "end that wraps around": (tensor("Y", offset=8192, byte_size=2**64 - 8192), "shm:table", "outputs[0]"),
    "size beyond the region": (tensor("Y", byte_size=REGION_SIZE), "shm:table", "outputs[0]"),
    "size that is not the shape's": (tensor("X", byte_size=12), "shm:table", "inputs[0].byte_size: found 12"),
    "no size": (tensor("X", byte_size=0), "shm:table", "inputs[0].byte_size: found 0"),
    "shape that is not the size's": (tensor("X", shape=[5]), "shm:table", "inputs[0].byte_size: found 16"),
    "shape of 64 bits": (tensor("X", shape=[LARGEST]), "shm:table", "inputs[0].byte_size"),
    "no element of a shape that no array has": (
        tensor("X", shape=[0, 2**62, 2**62], byte_size=0),
        "shm:table",
        "inputs[0].shape: found dimensions whose product has more than 63 bits",
    ),
    "no element of the largest shape": (tensor("X", shape=[0, LARGEST], byte_size=0), "shm:table", "inputs[0].shape"),
    "rank of one more": (tensor("X", rank=33), "shm:table", "inputs[0]: found rank 33"),
    "shape of 33 ones": (tensor("X", shape=[1] * 32 + [4]), "shm:table", "inputs[0]: found rank 33"),
    "no dimension": (tensor("X", shape=[], byte_size=4), "shm:tensor", "'X'"),
    "rank of an output": (tensor("Y", rank=1), "shm:table", "outputs[0]"),
    "shape of an output": (tensor("Y", shape=[4]), "shm:table", "outputs[0]: found a data type or a shape"),
    "data type of an output": (tensor("Y", datatype=11), "shm:table", "outputs[0]: found a data type or a shape"),
    "data type 0": (tensor("X", datatype=0), "shm:table", "inputs[0].datatype: found 0, expected 1 to 14"),
    "data type 15": (tensor("X", datatype=15), "shm:table", "inputs[0].datatype: found 15"),
    "another data type": (tensor("X", datatype=DATATYPES["INT32"]), "shm:tensor", "'X' is INT32"),
    "strings for numbers": (tensor("X", datatype=DATATYPES["BYTES"]), "shm:tensor", "'X' is BYTES"),
    "flags of an input": (tensor("X", flags=1), "shm:table", "inputs[0]: found region 0, flags 1"),
    "flags of an output": (tensor("Y", flags=0x8000), "shm:table", "outputs[0]: found region 0, flags 32768"),
    "input in region 1": (tensor("X", region=1), "shm:table", "inputs[0]: found region 1, flags 0, expected 0 to 0"),
    "name beyond the table": (tensor("Y", name_length=9), "shm:table", "outputs[0]: found rank 0 and a name of 9"),
    "longest name": (tensor("X", name_length=65535), "shm:table", "inputs[0]: found rank 1 and a name of 65535"),
    "no name": (tensor("X", name=b""), "shm:table", "inputs[0].name"),
    "name that is no UTF-8": (tensor("X", name=b"\xff\xfe"), "shm:table", "inputs[0].name"),
    "name with half a character": (tensor("Y", name=b"Y\xc3"), "shm:table", "outputs[0].name"),
    "name with a zero": (tensor("X", name=b"X\0"), "shm:tensor", "has no input 'X\\x00'"),
    "very long name": (tensor("X", name=b"X" * 1500), "shm:tensor", "has no input 'XXX"),
    "unknown input": (one_more_input(b"Q"), "shm:tensor", "has no input 'Q'; it has X"),
    "unknown output": (tensor("Y", name=b"y"), "shm:tensor", "has no output 'y'; it has Y"),
    "one more output": (one_more_output(b"Z"), "shm:tensor", "has no output 'Z'"),
    "input twice": (one_more_input(b"X"), "shm:table", "a name that is there twice"),
    "output twice": (one_more_output(b"Y"), "shm:table", "a name that is there twice"),
    "output over an input": (tensor("Y", offset=8192), "shm:table", "outputs.Y: found bytes of another tensor"),
    "output over an input's first byte": (
        lambda request: (tensor("X", offset=8192 + STEP)(request), tensor("Y", offset=8192 + STEP - 60)(request))[0],
        "shm:table",
        "outputs.Y",
    ),
    "input at an odd address": (tensor("X", offset=8193), "shm:table", "inputs.X.offset: found 8193, expected a place"),
    "output at an odd address": (tensor("Y", offset=8192 + STEP + 1), "shm:table", "outputs.Y.offset: found 12289"),
    "empty input at an odd address": (tensor("X", offset=8193, byte_size=0, shape=[0]), "shm:table", "inputs.X.offset"),
    "a ring for one answer": (head(frame_count=1), "shm:table", "frame_count: found 1, expected 0: model"),
    "region of kind 0": (claims(Claim(0, b"", 4096)), "shm:table", "regions[1].kind: found 0, expected 1, 2 or 3"),
    "region of kind 4": (claims(Claim(4, b"", 4096)), "shm:table", "regions[1].kind: found 4"),
    "region without a name": (claims(Claim(3, b"")), "shm:table", "regions[1].name"),
    "region's name with a zero": (claims(Claim(3, b"a\0b")), "shm:table", "regions[1].name"),
    "region's name beyond the table": (
        claims(Claim(3, b"a", name_length=2000)),
        "shm:table",
        "regions[1].name_length: found 2000",
    ),
    "region that nobody registered": (claims(Claim(3, b"nobody's")), "shm:gone", "regions[1] is not registered"),
    "region that is named twice": (
        claims(Claim(3, b"a"), Claim(3, b"a")),
        "shm:table",
        "regions[2]: found a region that is named before",
    ),
    "lent region of no size": (claims(Claim(1, b"shmbu-0-0")), "shm:table", "regions[1].byte_size: found 0"),
    "lent region of nobody": (claims(Claim(1, b"shmbu-0-0", 4096)), "shm:gone", "regions[1] does not exist"),
    "lent region that is none of ours": (claims(Claim(1, b"triton_python_0", 4096)), "shm:table", "regions[1].name"),
    "lent region that climbs": (claims(Claim(1, b"shmbu-../../etc/passwd", 4096)), "shm:table", "regions[1].name"),
    "own region, lent": (own_region_as_a_lent_one, "shm:table", "regions[1]: found memory that the request names befo"),
    "handle too short": (claims(Claim(2, bytes(63), 4096)), "shm:table", "regions[1].name_length: found 63"),
    "fence that is itself": (claims(Claim(2, bytes(64), 4096, fence=1)), "shm:table", "regions[1].fence: found 1"),
    "fence that is a name": (
        claims(Claim(3, b"a"), Claim(2, bytes(64), 4096, fence=1)),
        "shm:table",
        "regions[2].fence: found 1",
    ),
    "wrong token": (address(token="0" * 32), "shm:refused", "shm_slot refused: the token is not the region's"),
    "token in capitals": (address(token="A" * 32), "shm:table", "shm_slot: found other text"),
    "no such slot": (address(slot=1), "shm:table", "shm_slot.slot: found 1, expected less than 1"),
    "slot 1024": (address(slot=1024), "shm:table", "shm_slot: found other text"),
    "slot in other digits": (address(slot="\u0660"), "shm:table", "shm_slot: found other text"),
    "key of nobody": (address(key="shmbu-0-nobody"), "shm:gone", "shm_slot does not exist"),
    "key of the Python backend": (address(key="triton_python_backend_shm_region_0"), "shm:table", "shm_slot"),
    "key that climbs": (address(key="shmbu-../../etc/passwd"), "shm:table", "shm_slot"),
    "very long key": (address(key="shmbu-" + "0" * 65), "shm:table", "shm_slot"),
    "version 1": (address(version=1), "shm:version", "found 1, expected 2, which this model's shm_backend_utils"),
    "version 02": (address(version="02"), "shm:version", "expected 2"),
    "no version": (address(version=""), "shm:version", "found none, expected 2"),
}

STATUS: Final = {"shm:gone": ("StatusCode.NOT_FOUND", "404")}


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[tells_404] * (LIES[lie][1] in STATUS)) for lie in LIES])
def test_a_lie_is_refused_by_code_and_field_and_the_truth_is_served(
    made: HandMade, triton_server: EmbeddedServer, lie: str
) -> None:
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
