"""A table that breaks the protocol: one clear error by a code, the same over gRPC and HTTP; at a limit it is served."""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail, tells_404

from ..hand_made import DATATYPES, STEP, Claim, HandMade, Tensor
from ..hand_made import hand_made as made_for
from .breaks import REGION_SIZE, Break, X, is_served, one_more_input, refusals_of, tensor, valid


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
    "unknown input": (one_more_input(b"Q"), "shm:tensor", "has no input 'Q'; it has X"),
    "output twice": (one_more_output(b"Y"), "shm:table", "a name that is there twice"),
    "output over an input": (tensor("Y", offset=8192), "shm:table", "outputs.Y: found bytes of another tensor"),
    "output at an odd address": (tensor("Y", offset=8192 + STEP + 1), "shm:table", "outputs.Y.offset: found 12289"),
    "a ring for one answer": (head(frame_count=1), "shm:table", "frame_count: found 1, expected 0: model"),
    "region of kind 4": (claims(Claim(4, b"", 4096)), "shm:table", "regions[1].kind: found 4"),
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
        "regions[2].fence: found 1",
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


@has_ensembles_that_fail
def test_a_lying_table_for_a_step_fails_the_ensemble_by_its_code(triton_server: EmbeddedServer) -> None:
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with made_for(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
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
