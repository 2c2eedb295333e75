"""How a model claims a generation of a slot for execution, and from whom; and what of a table is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME, BYTES
from shm_backend_utils.errors import BatchSizeError, ShmError, TableError
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.call.checks import check_rows, check_table
from shm_backend_utils.model.mapping.memory import HostMemory, MappedMemory
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, log_lines, message_of
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)
FP32 = BY_NAME["FP32"]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    inputs = [tensor("X"), tensor("TEXT", "STRING"), tensor("CUBE", "UINT8", [-1, -1, -1])]
    with session_of(monkeypatch, inputs, [tensor("Y"), tensor("WORDS", "STRING"), tensor("B", "UINT8")]) as session:
        yield session


def request_of(client: Client, **parameters: Any) -> InferenceRequest:
    return client.request({"X": X}, {"Y": 16}, **parameters)


def pass_on(call: Call) -> None:
    call.put("Y", call.input("X"))


def answer(
    session: ShmSession, request: InferenceRequest, infer: Callable[[Call], object] = pass_on
) -> tuple[str, str]:
    (response,) = session.serve([request], infer)
    return error_code(response), message_of(response)


def refused(session: ShmSession, client: Client, said: Table | bytes, *outputs: str) -> str:
    executed: list[Call] = []
    code, text = answer(session, delivered(client.begin(said), outputs), executed.append)
    assert code == "INVALID_ARG"
    assert (executed, log_lines()) == ([], [])
    assert (client.region.record(0).started, client.region.record(0).completed) == (0, 0)
    assert client.is_free()
    assert client.region.segment.key not in text
    assert client.region.header.token.hex() not in text
    return text


def test_slots_whose_locks_are_held_are_refused_at_once(session: ShmSession, client: Client) -> None:
    request = request_of(client)
    assert client.region.lease(0).take()
    responses = session.serve([request] * 100, pass_on)
    told = {(error_code(response), message_of(response)[:10]) for response in responses}
    assert told == {("CANCELLED", "shm:busy: ")}
    client.region.lease(0).give_back()
    assert answer(session, request) == ("", "")
    request = request_of(client)
    assert client.region.lease(0).take()
    client.region.record(0).generation = 3
    assert answer(session, request)[1].startswith("shm:stale: ")
    client.region.lease(0).give_back()


def test_a_request_that_comes_twice_at_once_or_later_is_told_so(session: ShmSession, client: Client) -> None:
    request = request_of(client)
    told: list[tuple[str, str]] = []

    def infer(call: Call) -> None:
        told.append(answer(session, request))
        pass_on(call)

    assert answer(session, request, infer) == ("", "")
    told.append(answer(session, request, infer))
    assert [(code, text.partition(": ")[0]) for code, text in told] == [("ALREADY_EXISTS", "shm:replayed")] * 2
    assert (client.is_over(), client.has_results()) == (True, True)


def test_a_stale_request_takes_no_lease(session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SlotLease, "take")
    for _ in range(2):
        request_of(client)
    for generation in (1, 3):
        request = delivered({"shm_slot": client.address(), "shm_generation": generation}, ["Y"])
        code, text = answer(session, request)
        assert (code, text[:11]) == ("CANCELLED", "shm:stale: ")
    for wrong in (0, 1.0, True, "1", None):
        code, text = answer(session, delivered({"shm_slot": client.address(), "shm_generation": wrong}, ["Y"]))
        assert (code, "shm_generation: found" in text) == ("INVALID_ARG", True)
    assert client.region.record(0).started == 0
    assert client.is_free()


@pytest.mark.parametrize("moment", ["another generation", "another table", "held"])
def test_changes_are_noticed(session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    request = request_of(client)
    take = SlotLease.take

    def take_late(lease: SlotLease) -> bool:
        if moment == "another table":
            client.begin(b"\xff" * 64)  # of the slot's next request, which is none of this one's
        else:
            client.region.record(0).generation = 2
        return moment != "held" and take(lease)

    with monkeypatch.context() as patch:
        patch.setattr(SlotLease, "take", take_late)
        assert answer(session, request)[1].startswith("shm:stale: ")
    assert client.region.record(0).started == 0
    assert client.is_free()


def test_a_slot_of_another_model_or_beside_a_descriptor_is_none(session: ShmSession, client: Client) -> None:
    other = Client("another")
    assert answer(session, request_of(other))[1] == (
        "shm:missing: the request has no input 'X', which the model needs; its shm_slot is for another model"
    )
    assert other.region.record(0).started == 0
    other.close()
    said = '{"v": 1, "model": "m", "regions": [], "inputs": {}, "outputs": {}}'
    code, text = answer(session, request_of(client, shm_io=said))
    assert (code, text.partition(": ")[0]) == ("INVALID_ARG", "shm:table")
    assert client.is_free()


AT = 8192
"""Where the client's data begin."""
FLOATS = InputSpan(FP32, (4,), 0, AT, 16)


@pytest.mark.parametrize(
    ("inputs", "outputs", "complaint"),
    [
        ({"Q": FLOATS}, {}, "shm:tensor: model 'm' has no input 'Q'; it has X, TEXT, CUBE"),
        ({}, {"Y_": OutputSpan(0, AT, 16)}, "shm:tensor: model 'm' has no output 'Y_'; .*; did you mean 'Y'?"),
        *[
            ({"X": FLOATS._replace(offset=AT + odd)}, {}, "shm:table: inputs.X.offset: .* a multiple of 4 bytes")
            for odd in (1, 2, 3)
        ],
        *[({}, {"Y": OutputSpan(0, AT + odd, 16)}, "shm:table: outputs.Y.offset: found ") for odd in (1, 2, 3)],
        ({"X": FLOATS._replace(dtype=BY_NAME["INT32"])}, {}, ".* is INT32, but the model's .* says TYPE_FP32"),
        ({"X": FLOATS._replace(shape=(2, 2))}, {}, r".*has shape \[2, 2\]"),
        ({"X": InputSpan(FP32, (), 0, AT, 4)}, {}, r".*has shape \[\]"),
        *[({}, {"Y": OutputSpan(0, *place)}, r".*outputs\[0\]: found") for place in [(4096, 16), (AT, 1 << 40)]],
        ({"X": FLOATS}, {"Y": OutputSpan(0, AT + 12, 16)}, ".*outputs.Y: found bytes of another tensor"),
    ],
)
def test_a_table_of_tensors_that_cannot_be_is_refused(
    session: ShmSession, client: Client, inputs: dict[str, InputSpan], outputs: dict[str, OutputSpan], complaint: str
) -> None:
    assert client.data == AT
    assert re.match(complaint, refused(session, client, Table(inputs, outputs)))


def test_a_slot_returns_with_its_results(session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets the lease reads the results, or begins the next request over them."""
    give_back, record, seen = SlotLease.give_back, client.region.record(0), []

    def looked_at(lease: SlotLease) -> None:
        seen.append((record.completed, client.has_results()))
        give_back(lease)

    def infer(call: Call) -> None:
        assert (client.is_free(), record.started, record.completed) == (False, 1, 0)
        pass_on(call)
        monkeypatch.setattr(SlotLease, "give_back", looked_at)

    assert answer(session, request_of(client), infer) == ("", "")
    assert seen == [(1, True)]
    assert client.is_free()


UINT8 = BY_NAME["UINT8"]
BEGIN, SIZE = 4096, 8192


def spec(dtype: str = "UINT8", dims: list[int] | None = None, **config: Any) -> ModelSpec:
    tensors = {"input": [tensor("X", dtype, dims or [-1])], "output": [tensor("Y", dtype)]}
    return ModelSpec.from_config({"name": "m", **tensors, **config})


def memories() -> list[MappedMemory]:
    array = np.zeros(SIZE + 64, np.uint8)
    array = array[-array.__array_interface__["data"][0] % 64 :]
    return [HostMemory(array), HostMemory(array, byte_size=SIZE, data_begin=BEGIN)]


def output(offset: int, byte_size: int, ring: Ring | None = None) -> Table:
    return Table({}, {"Y": OutputSpan(1, offset, byte_size)}, ring=ring)


def lying_input(offset: int, byte_size: int) -> Table:
    return Table({"X": InputSpan(UINT8, (byte_size,), 1, offset, byte_size)}, {})


@pytest.mark.parametrize("table_of", [output, lying_input])
def test_tensors_may_have_all_data_of_a_further_region_and_no_byte_more(table_of: Any) -> None:
    check_table(spec(), table_of(BEGIN, SIZE - BEGIN), memories())
    check_table(spec(), table_of(SIZE - 1, 1), memories())
    for offset, byte_size in ((BEGIN, SIZE - BEGIN + 1), (BEGIN - 1, 1), (SIZE, 1), (SIZE + 1, 0)):
        with pytest.raises(TableError, match="its region's data"):
            check_table(spec(), table_of(offset, byte_size), memories())


ON_GPU = cast(MappedMemory, SimpleNamespace(device=0, address=0, data_begin=0, byte_size=SIZE))
TEXT = Table({"X": InputSpan(BYTES, (1,), 1, 0, 5)}, {})


@pytest.mark.parametrize(
    ("model", "said", "further", "refusal"),
    [
        (spec(), output(SIZE - 24, 8, Ring(0, 3, 8)), None, ""),
        (spec(), output(SIZE - 24, 9, Ring(0, 3, 8)), None, "outputs.Y: found 25 bytes"),
        (spec("FP32"), output(BEGIN, 16, Ring(0, 1, 3)), None, ""),  # one of one frame has no stride
        (spec("FP32"), output(BEGIN, 16, Ring(0, 2, 3)), None, "frame_stride: found 3"),
        (spec("STRING"), TEXT, ON_GPU, "inputs.X: found strings in memory of a GPU"),
        (spec("STRING"), TEXT, HostMemory(np.zeros(8, np.uint8)), ""),
        (spec(), lying_input(0, 5), ON_GPU, ""),
        (spec("STRING"), output(BEGIN + 1, 16, Ring(0, 2, 17)), None, ""),  # which may begin anywhere
        (spec("UNHEARD_OF"), output(BEGIN + 1, 16), None, ""),
        (spec(dims=[4]), lying_input(BEGIN, 5), None, "tensor 'X' has shape"),
    ],
)
def test_tables_fit_model_and_region(model: ModelSpec, said: Table, further: MappedMemory | None, refusal: str) -> None:
    own, region = memories()
    with pytest.raises(ShmError, match=refusal) if refusal else contextlib.nullcontext():
        check_table(model, said, [own, further or region])
    with pytest.raises(BatchSizeError, match="tensor 'X' has no dimension; its first one is the batch"):
        check_rows(Table({"X": InputSpan(UINT8, (), 0, BEGIN, 1)}, {}), 1)
