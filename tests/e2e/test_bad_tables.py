"""A table, or an address of a slot, that breaks the protocol: one clear error by a code, the same over gRPC and HTTP.

Nothing is written then, no secret is told, and the next request is served.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer

from .flavours import url_of
from .hand_made import DATATYPES, FIRST_GENERATION, STEP, Claim, HandMade, Tensor
from .hand_made import hand_made as made_for

X: Final = np.array([1, 2, 3, 4], np.float32)
ROOM: Final = 64
REGION_SIZE: Final = 2 * 4096 + 8 * STEP
MOST: Final = 2**63 - 1
LARGEST: Final = 2**64 - 1

Break = Callable[[HandMade], None]


@pytest.fixture
def made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    with valid(triton_server.grpc_url) as request:
        yield request


@contextlib.contextmanager
def valid(url: str, **options: Any) -> Iterator[HandMade]:
    """Make a valid request to a model that copies X to Y."""
    with made_for(url, "repeat", {"X": X}, {"Y": ROOM}, **options) as request:
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
    """Return whether a model gives what it is asked for."""
    request.infer()
    return bool((request.output("Y", np.float32)[: X.size] == X).all())


def tensor(which: str, **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        for field, value in fields.items():
            setattr(request.table[which], field, value)

    return change


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


def patch(offset: int, data: bytes) -> Break:
    return lambda request: request.patches.update({offset: data})


def claims(*found: Claim) -> Break:
    return lambda request: request.table.regions.extend(found)


def one_more_input(name: bytes, **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        given = {"offset": 8192 + 4 * STEP, "byte_size": 16, "datatype": DATATYPES["FP32"], "shape": [4], **fields}
        request.table.inputs.append(Tensor(name, **given))

    return change


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
    "length of less than the head": (head(length=31), "shm:table", "length: found 31"),
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
    "shape that wraps around": (tensor("X", shape=[2**62 + 4]), "shm:table", "inputs[0].byte_size"),
    "no element of a shape that no array has": (
        tensor("X", shape=[0, 2**62, 2**62], byte_size=0),
        "shm:table",
        "inputs[0].shape: found dimensions whose product has more than 63 bits",
    ),
    "no element of the largest shape": (tensor("X", shape=[0, LARGEST], byte_size=0), "shm:table", "inputs[0].shape"),
    "rank of one more": (tensor("X", rank=33), "shm:table", "inputs[0]: found rank 33"),
    "largest rank": (tensor("X", rank=255), "shm:table", "inputs[0]: found rank 255"),
    "shape of 33 ones": (tensor("X", shape=[1] * 32 + [4]), "shm:table", "inputs[0]: found rank 33"),
    "shape of 32 dimensions": (tensor("X", shape=[1] * 31 + [4]), "shm:tensor", "'X'"),
    "no dimension": (tensor("X", shape=[], byte_size=4), "shm:tensor", "'X'"),
    "rank of an output": (tensor("Y", rank=1), "shm:table", "outputs[0]"),
    "shape of an output": (tensor("Y", shape=[4]), "shm:table", "outputs[0]: found a data type or a shape"),
    "data type of an output": (tensor("Y", datatype=11), "shm:table", "outputs[0]: found a data type or a shape"),
    "data type 0": (tensor("X", datatype=0), "shm:table", "inputs[0].datatype: found 0, expected 1 to 14"),
    "data type 15": (tensor("X", datatype=15), "shm:table", "inputs[0].datatype: found 15"),
    "largest data type": (tensor("X", datatype=255), "shm:table", "inputs[0].datatype: found 255"),
    "another data type": (tensor("X", datatype=DATATYPES["INT32"]), "shm:tensor", "'X' is INT32"),
    "strings for numbers": (tensor("X", datatype=DATATYPES["BYTES"]), "shm:tensor", "'X' is BYTES"),
    "flags of an input": (tensor("X", flags=1), "shm:table", "inputs[0]: found region 0, flags 1"),
    "flags of an output": (tensor("Y", flags=0x8000), "shm:table", "outputs[0]: found region 0, flags 32768"),
    "input in region 1": (tensor("X", region=1), "shm:table", "inputs[0]: found region 1, flags 0, expected 0 to 0"),
    "output in region 65535": (tensor("Y", region=65535), "shm:table", "outputs[0]: found region 65535"),
    "name beyond the table": (tensor("Y", name_length=9), "shm:table", "outputs[0]: found rank 0 and a name of 9"),
    "longest name": (tensor("X", name_length=65535), "shm:table", "inputs[0]: found rank 1 and a name of 65535"),
    "no name": (tensor("X", name=b""), "shm:table", "inputs[0].name"),
    "no name of an output": (tensor("Y", name=b""), "shm:table", "outputs[0].name"),
    "name that is no UTF-8": (tensor("X", name=b"\xff\xfe"), "shm:table", "inputs[0].name"),
    "name with half a character": (tensor("Y", name=b"Y\xc3"), "shm:table", "outputs[0].name"),
    "name with a surrogate": (tensor("Y", name=b"\xed\xa0\x80"), "shm:table", "outputs[0].name"),
    "name with a zero": (tensor("X", name=b"X\0"), "shm:tensor", "has no input 'X\\x00'"),
    "very long name": (tensor("X", name=b"X" * 1500), "shm:tensor", "has no input 'XXX"),
    "unknown input": (one_more_input(b"Q"), "shm:tensor", "has no input 'Q'; it has X"),
    "unknown input alone": (tensor("X", name=b"Q"), "shm:tensor", "has no input 'Q'"),
    "unknown output": (tensor("Y", name=b"y"), "shm:tensor", "has no output 'y'; it has Y"),
    "one more output": (one_more_output(b"Z"), "shm:tensor", "has no output 'Z'"),
    "input that is an output": (one_more_input(b"Y"), "shm:tensor", "has no input 'Y'"),
    "output that is an input": (one_more_output(b"X"), "shm:tensor", "has no output 'X'"),
    "input twice": (one_more_input(b"X"), "shm:table", "a name that is there twice"),
    "output twice": (one_more_output(b"Y"), "shm:table", "a name that is there twice"),
    "output over an input": (tensor("Y", offset=8192), "shm:table", "outputs.Y: found bytes of another tensor"),
    "output over an input's last byte": (tensor("Y", offset=8192 + 12), "shm:table", "outputs.Y"),
    "input in an output": (tensor("X", offset=8192 + STEP + 16), "shm:table", "outputs.Y"),
    "output over an input's first byte": (
        lambda request: (tensor("X", offset=8192 + STEP)(request), tensor("Y", offset=8192 + STEP - 60)(request))[0],
        "shm:table",
        "outputs.Y",
    ),
    "input at an odd address": (tensor("X", offset=8193), "shm:table", "inputs.X.offset: found 8193, expected a place"),
    "input at half an element": (tensor("X", offset=8194), "shm:table", "inputs.X.offset: found 8194"),
    "output at an odd address": (tensor("Y", offset=8192 + STEP + 1), "shm:table", "outputs.Y.offset: found 12289"),
    "empty input at an odd address": (tensor("X", offset=8193, byte_size=0, shape=[0]), "shm:table", "inputs.X.offset"),
    "a ring for one answer": (head(frame_count=1), "shm:table", "frame_count: found 1, expected 0: model"),
    "a ring of too many": (head(frame_count=65), "shm:table", "frame_count: found 65, expected at most 64"),
    "region of kind 0": (claims(Claim(0, b"", 4096)), "shm:table", "regions[1].kind: found 0, expected 1, 2 or 3"),
    "region of kind 4": (claims(Claim(4, b"", 4096)), "shm:table", "regions[1].kind: found 4"),
    "region of kind 255": (claims(Claim(255, b"", 4096)), "shm:table", "regions[1].kind: found 255"),
    "region without a name": (claims(Claim(3, b"")), "shm:table", "regions[1].name"),
    "region's name that is no UTF-8": (claims(Claim(3, b"\xff")), "shm:table", "regions[1].name"),
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
    "lent region of 64 bits": (claims(Claim(1, b"shmbu-0-0", LARGEST)), "shm:table", "regions[1].byte_size"),
    "lent region of nobody": (claims(Claim(1, b"shmbu-0-0", 4096)), "shm:gone", "regions[1] does not exist"),
    "lent region that is none of ours": (claims(Claim(1, b"triton_python_0", 4096)), "shm:table", "regions[1].name"),
    "lent region that climbs": (claims(Claim(1, b"shmbu-../../etc/passwd", 4096)), "shm:table", "regions[1].name"),
    "own region, lent": (own_region_as_a_lent_one, "shm:table", "regions[1]: found memory that the request names befo"),
    "handle too short": (claims(Claim(2, bytes(63), 4096)), "shm:table", "regions[1].name_length: found 63"),
    "handle too long": (claims(Claim(2, bytes(72), 4096)), "shm:table", "regions[1].name_length: found 72"),
    "fence that is itself": (claims(Claim(2, bytes(64), 4096, fence=1)), "shm:table", "regions[1].fence: found 1"),
    "fence that is a name": (
        claims(Claim(3, b"a"), Claim(2, bytes(64), 4096, fence=1)),
        "shm:table",
        "regions[2].fence: found 1",
    ),
    "wrong token": (address(token="0" * 32), "shm:refused", "shm_slot refused: the token is not the region's"),
    "token in capitals": (address(token="A" * 32), "shm:table", "shm_slot: found other text"),
    "token too short": (address(token="0" * 31), "shm:table", "shm_slot"),
    "no such slot": (address(slot=1), "shm:table", "shm_slot.slot: found 1, expected less than 1"),
    "slot 1023": (address(slot=1023), "shm:table", "shm_slot.slot: found 1023"),
    "slot 1024": (address(slot=1024), "shm:table", "shm_slot: found other text"),
    "negative slot": (address(slot=-1), "shm:table", "shm_slot: found other text"),
    "slot in other digits": (address(slot="\u0660"), "shm:table", "shm_slot: found other text"),
    "slot and a line's end": (address(slot="0\n"), "shm:table", "shm_slot: found other text"),
    "key of nobody": (address(key="shmbu-0-nobody"), "shm:gone", "shm_slot does not exist"),
    "key of the Python backend": (address(key="triton_python_backend_shm_region_0"), "shm:table", "shm_slot"),
    "key that climbs": (address(key="shmbu-../../etc/passwd"), "shm:table", "shm_slot"),
    "key with a zero": (address(key="shmbu-1-\0"), "shm:table", "shm_slot"),
    "very long key": (address(key="shmbu-" + "0" * 65), "shm:table", "shm_slot"),
    "version 1": (address(version=1), "shm:version", "found 1, expected 2, which this model's shm_backend_utils"),
    "version 3": (address(version=3), "shm:version", "found 3, expected 2, which this model's shm_backend_utils"),
    "version 02": (address(version="02"), "shm:version", "expected 2"),
    "no version": (address(version=""), "shm:version", "found none, expected 2"),
    "version of words": (address(version="two"), "shm:version", "found none, expected 2"),
}
STATUS: Final = {"shm:gone": ("StatusCode.NOT_FOUND", "404")}


@pytest.mark.parametrize("lie", LIES)
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


# What is not a lie


def at_the_end_of_the_region(request: HandMade) -> None:
    request.table["Y"].offset = REGION_SIZE - ROOM


def without_a_gap(request: HandMade) -> None:
    request.table["Y"].offset = 8192 + X.nbytes


def in_the_other_order(request: HandMade) -> None:
    request.table["X"].offset, request.table["Y"].offset = 8192 + STEP, 8192
    request.region.bytes()[8192 + STEP :][: X.nbytes] = X.view(np.uint8)


def with_bytes_behind_the_table(request: HandMade) -> None:
    request.patches = {len(request.table.packed(0)): b"\xff" * 1024}


@pytest.mark.parametrize(
    "change",
    [at_the_end_of_the_region, without_a_gap, in_the_other_order, with_bytes_behind_the_table],
)
def test_what_is_at_a_limit_is_served(made: HandMade, change: Break) -> None:
    change(made)
    assert is_served(made)


def test_inputs_may_be_the_same_bytes(triton_server: EmbeddedServer) -> None:
    with made_for(triton_server.grpc_url, "adder", {"A": X, "B": X}, {"SUM": X.nbytes}) as request:
        request.table["B"].offset = request.table["A"].offset
        request.infer()
        assert request.output("SUM", np.float32).tolist() == (2 * X).tolist()


def test_a_record_of_the_largest_size_has_room_for_the_longest_name(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        assert is_served(request)
        request.next()
        request.table.length = (1 << 19) + 1
        with pytest.raises(InferenceServerException, match="shm:table: length: found 524289, expected 32 to 524288"):
            request.infer()
        request.table.length = None
        request.table["X"].name = b"X" * 65535
        with pytest.raises(InferenceServerException, match="shm:tensor: model 'repeat' has no input 'XXX"):
            request.infer()


# Which model, which version


def test_a_client_of_version_1_is_told_both_versions(made: HandMade, triton_server: EmbeddedServer) -> None:
    key, token = made.address.key, made.address.token
    region = {"kind": "system", "key": key, "byte_size": REGION_SIZE, "token": token, "slot": 0}
    tensors = {"inputs": {"X": [0, 8192, 16, "FP32", [4]]}, "outputs": {"Y": [0, 8192 + STEP, 16]}}
    descriptor = {"v": 1, "model": "repeat", "regions": [region], **tensors}
    made.write()
    before = made.content()
    for protocol in ("grpc", "http"):
        client = made.client(url_of(triton_server, protocol))
        parameters = {"shm_io": json.dumps(descriptor), "shm_generation": FIRST_GENERATION, "times": 1}
        with pytest.raises(InferenceServerException) as refusal:
            client.infer("repeat", [], parameters=parameters)
        text = refusal.value.message()
        assert code_in(text) == "shm:version"
        assert "found 1, expected 2" in text
        assert key not in text
        assert token not in text
    assert made.content() == before
    assert is_served(made)


NO_ADDRESSES: Final = (7, True, 2.5, "", "2", "2/", "2////", "/" * 100, "x" * 100_000)


@pytest.mark.parametrize("value", NO_ADDRESSES, ids=lambda value: str(value)[:9])
def test_what_is_no_address_is_refused(made: HandMade, triton_server: EmbeddedServer, value: object) -> None:
    made.parameters["shm_slot"] = value
    texts = {text for _, text in refusals_of(made, triton_server)}
    assert len(texts) == 1
    assert code_in(texts.pop()) in ("shm:table", "shm:version")
    del made.parameters["shm_slot"]
    assert is_served(made)


def test_a_slot_and_a_descriptor_at_once_are_refused(made: HandMade, triton_server: EmbeddedServer) -> None:
    made.parameters["shm_io"] = json.dumps({"v": 1, "model": "repeat", "regions": [], "inputs": {}, "outputs": {}})
    texts = {text for _, text in refusals_of(made, triton_server)}
    assert len(texts) == 1
    assert "shm:table: shm_io: found a descriptor beside shm_slot, expected one of the two" in texts.pop()
    del made.parameters["shm_io"]
    assert is_served(made)


def test_a_table_for_another_model_is_not_looked_at(triton_server: EmbeddedServer) -> None:
    """The parameters reach every step of an ensemble. Whom the slot is not for, that has none of its tensors."""
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with made_for(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.address.model = "multiply"
        request.table.length = 0
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException, match="its shm_slot speaks to another model") as refusal:
            request.send([x])
        assert "shm:missing: " in refusal.value.message()
        assert request.content() == before


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


# Batches


BATCH_LIES: Final[dict[str, tuple[Break, str]]] = {
    "no dimension": (tensor("X", shape=[], byte_size=4), "'X'"),
    "no row": (tensor("X", shape=[0, 4], byte_size=0), "'X'"),
    "another number of rows": (
        tensor("X", shape=[2, 4], byte_size=32),
        "'X' has a batch of 2, but the request has one",
    ),
    "another row": (tensor("X", shape=[1, 2], byte_size=8), "'X'"),
    "an input that there is not": (one_more_input(b"Q", shape=[1, 4]), "'Q'"),
}


@pytest.mark.parametrize("lie", BATCH_LIES)
def test_rows_that_are_not_there_are_refused(triton_server: EmbeddedServer, lie: str) -> None:
    change, complaint = BATCH_LIES[lie]
    row = X.reshape(1, 4)
    with made_for(f"http://{triton_server.http_url}", "batch_witness", {"X": row}, {"Y": ROOM}) as request:
        change(request)
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException) as refusal:
            request.send([request.carrier(1)])
        assert code_in(refusal.value.message()) == "shm:tensor"
        assert complaint in refusal.value.message()
        assert request.content() == before


# What changes while it is read


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
            lengths, codes = answers_of(request, 1000)
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


@pytest.mark.parametrize(("gives_up", "code"), [(True, "shm:stale"), (False, "shm:busy")])
def test_a_slot_that_its_client_holds_is_waited_for_not_long(made: HandMade, gives_up: bool, code: str) -> None:
    made.write()
    before = made.content()
    lease = made.region.lease(0)
    assert lease.take()
    try:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(made.send)
            wait([answer], timeout=0.02)
            if gives_up:
                made.record.generation += 1
            error = answer.exception()
    finally:
        lease.give_back()
    assert isinstance(error, InferenceServerException)
    assert code_in(error.message()) == code
    assert made.content() == before
    made.next()
    assert is_served(made)


# How long it takes


MANY: Final = [f"{index:08x}".encode() for index in range(13_000)]


def many_inputs(request: HandMade, count: int) -> None:
    request.table.inputs = [Tensor(name, 2 << 20, 0, 0, DATATYPES["FP32"], [0]) for name in MANY[:count]]


def many_outputs(request: HandMade, count: int) -> None:
    request.table.outputs = [Tensor(name, 2 << 20, 0) for name in MANY[: count - 1]]


def many_regions(request: HandMade, count: int) -> None:
    request.table.regions = [Claim(3, name) for name in MANY[:count]]


@pytest.mark.parametrize(
    ("fill", "count"),
    [
        (many_inputs, 512),
        (many_outputs, 512),
        (many_regions, 64),
        *[(fill, 13_000) for fill in (many_inputs, many_outputs, many_regions)],
    ],
)
def test_the_largest_lie_costs_next_to_nothing(
    triton_server: EmbeddedServer, fill: Callable[[HandMade, int], None], count: int
) -> None:
    """In a record of the largest size there is room for more than ten thousand tensors, which no model has."""
    with valid(triton_server.grpc_url, record_byte_size=1 << 20, tensor_count=512) as request:
        fill(request, count)
        request.write()
        took = []
        for _ in range(9):
            before = time.perf_counter()
            with pytest.raises(InferenceServerException, match="shm:(table|tensor|gone): "):
                request.send()
            took.append(time.perf_counter() - before)
        assert sorted(took)[4] < 0.02


def test_the_longest_name_is_told_as_far_as_an_error_goes(triton_server: EmbeddedServer) -> None:
    with valid(triton_server.grpc_url, record_byte_size=1 << 20) as request:
        request.table["X"].name = "ß".encode() * 32_000
        (status, text), (_, over_http) = refusals_of(request, triton_server)
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text == over_http
        assert text.startswith("shm:tensor: model 'repeat' has no input 'ßßß")
        assert text.endswith("ßß … (cut)")
