"""How a model claims a generation of a slot for execution, and from whom; and what of a table is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME, BYTES
from shm_backend_utils.memory.locks import SlotLease
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol import table
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
    """Return the code of Triton and the text that a request is answered with; nothing if it is served."""
    (response,) = session.serve([request], infer)
    return error_code(response), message_of(response)


def refused(session: ShmSession, client: Client, said: Table | bytes, *outputs: str) -> str:
    """Return the text that a table is refused with: as the caller's error, with nothing started and nothing held."""
    executed: list[Call] = []
    code, text = answer(session, delivered(client.begin(said), outputs), executed.append)
    assert code == "INVALID_ARG"
    assert (executed, log_lines()) == ([], [])
    assert (client.region.record(0).started, client.region.record(0).completed) == (0, 0)
    assert client.is_free()
    assert client.region.segment.key not in text
    assert client.region.header.token.hex() not in text
    return text


def test_the_lease_is_held_until_the_end_and_the_record_tells_how_far_it_is(
    session: ShmSession, client: Client
) -> None:
    seen: list[tuple[bool, int, int]] = []
    record = client.region.record(0)

    def infer(call: Call) -> None:
        seen.append((client.is_free(), record.started, record.completed))
        pass_on(call)

    assert answer(session, request_of(client), infer) == ("", "")
    assert seen == [(False, 1, 0)]
    assert (client.is_free(), record.completed) == (True, 1)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_request_of_another_generation_is_stale(session: ShmSession, client: Client, difference: int) -> None:
    for _ in range(2):
        request_of(client)
    request = delivered({"shm_slot": client.address(), "shm_generation": 2 + difference}, ["Y"])
    code, text = answer(session, request)
    assert code == "CANCELLED"
    assert text.startswith("shm:stale: ")
    assert client.region.record(0).started == 0
    assert client.is_free()


def test_a_generation_is_executed_once(session: ShmSession, client: Client) -> None:
    request = request_of(client)
    assert answer(session, request) == ("", "")
    code, text = answer(session, request)
    assert code == "ALREADY_EXISTS"
    assert text.startswith("shm:replayed: ")
    assert (client.is_free(), client.has_results()) == (True, True)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None], ids=repr)
def test_what_is_no_generation_is_refused(session: ShmSession, client: Client, value: object) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    code, text = answer(session, delivered({**parameters, "shm_generation": value}, ["Y"]))
    assert (code, text.partition(":")[0]) == ("INVALID_ARG", "shm")
    assert "shm_generation" in text
    assert client.is_free()


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


def test_a_request_that_comes_twice_while_it_is_executed_is_told_so(session: ShmSession, client: Client) -> None:
    request = request_of(client)
    second: list[tuple[str, str]] = []

    def infer(call: Call) -> None:
        second.append(answer(session, request))
        pass_on(call)

    assert answer(session, request, infer) == ("", "")
    ((code, text),) = second
    assert (code, text.partition(": ")[0]) == ("ALREADY_EXISTS", "shm:replayed")
    assert client.is_over()


def test_a_stale_request_takes_no_lease_so_that_it_is_in_nobodys_way(
    session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(client)
    client.region.record(0).generation = 2
    monkeypatch.delattr(SlotLease, "take")
    assert answer(session, request)[1].startswith("shm:stale: ")


@pytest.mark.parametrize("moment", ["another generation", "another table", "held"])
def test_the_generation_is_looked_at_again_when_the_lease_is_held_or_not_to_be_had(
    session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
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


# Addresses


@pytest.mark.parametrize(
    ("change", "code", "triton"),
    [
        (lambda address: address.replace("2/", "1/", 1), "shm:version", "INVALID_ARG"),
        (lambda address: address.replace("2/", "99/", 1), "shm:version", "INVALID_ARG"),
        (lambda address: "", "shm:version", "INVALID_ARG"),
        (lambda address: address + "0", "shm:table", "INVALID_ARG"),
        (lambda address: address + "9999", "shm:table", "INVALID_ARG"),
        (lambda address: address.replace("shmbu-", "shmbu-../"), "shm:table", "INVALID_ARG"),
        (lambda address: address.replace("shmbu-", "shmbu-0-"), "shm:gone", "NOT_FOUND"),
        (lambda address: "/".join([*address.split("/")[:3], "0" * 32, "0"]), "shm:refused", "INVALID_ARG"),
        (lambda address: 7, "shm:table", "INVALID_ARG"),
        (lambda address: True, "shm:table", "INVALID_ARG"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    session: ShmSession, client: Client, change: Callable[[str], object], code: str, triton: str
) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    found, text = answer(session, delivered({**parameters, "shm_slot": change(client.address())}, ["Y"]))
    assert (found, text.partition(": ")[0]) == (triton, code)
    assert client.region.segment.key not in text


def test_a_slot_of_another_model_is_none_of_this_ones(session: ShmSession) -> None:
    other = Client("another")
    _, text = answer(session, request_of(other))
    assert text == (
        "shm:missing: the request has no input 'X', which the model needs; its shm_slot speaks to another model"
    )
    assert other.region.record(0).started == 0
    other.close()


def test_a_client_of_version_1_is_told_both_versions(session: ShmSession) -> None:
    region = {"kind": "system", "key": "shmbu-1-00", "byte_size": 8192, "token": "0" * 32, "slot": 0}
    said = json.dumps({"v": 1, "model": "m", "regions": [region], "inputs": {}, "outputs": {}})
    code, text = answer(session, delivered({"shm_io": said, "shm_generation": 1}, ["Y"]))
    assert (code, text.partition(": ")[0]) == ("INVALID_ARG", "shm:version")
    assert "found 1, expected 2" in text


@pytest.mark.parametrize(("count", "complaint"), [(512, "has no output 'O0'"), (10_000, "expected at most 512")])
def test_many_outputs_that_the_model_does_not_have_are_refused(session: ShmSession, count: int, complaint: str) -> None:
    client = Client(record_byte_size=1 << 20)
    said = table.encode(Table({}, {f"O{number}": OutputSpan(0, client.data, 0) for number in range(count)}))
    assert complaint in refused(session, client, said)
    client.close()


AT = 8192
"""Where the client's data begin."""


@pytest.mark.parametrize(
    ("inputs", "outputs", "complaint"),
    [
        ({"Q": InputSpan(FP32, (4,), 0, AT, 16)}, {}, "shm:tensor: model 'm' has no input 'Q'; it has X, TEXT, CUBE"),
        ({}, {"Y_": OutputSpan(0, AT, 16)}, "shm:tensor: model 'm' has no output 'Y_'; .*; did you mean 'Y'?"),
        *[
            ({"X": InputSpan(FP32, (4,), 0, AT + odd, 16)}, {}, "shm:table: inputs.X.offset: .* a multiple of 4 bytes")
            for odd in (1, 2, 3)
        ],
        *[({}, {"Y": OutputSpan(0, AT + odd, 16)}, "shm:table: outputs.Y.offset: found ") for odd in (1, 2, 3)],
        *[
            ({"CUBE": InputSpan(BY_NAME["UINT8"], shape, 0, AT, 0)}, {}, r"shm:table: inputs\[0\]")
            for shape in [(0, 2**62, 2**62), (2**62, 0, 2**62), (2**63, 0, 0), (2**64 - 1, 2**64 - 1, 0)]
        ],
        ({"CUBE": InputSpan(BY_NAME["UINT8"], (2**32, 2**32, 1), 0, AT, 0)}, {}, r"shm:table: inputs\[0\]"),
        ({"X": InputSpan(BY_NAME["INT32"], (4,), 0, AT, 16)}, {}, ".* is INT32, but the model's .* says TYPE_FP32"),
        ({"X": InputSpan(FP32, (2, 2), 0, AT, 16)}, {}, r".*has shape \[2, 2\]"),
        ({"X": InputSpan(FP32, (), 0, AT, 4)}, {}, r".*has shape \[\]"),
        *[
            ({}, {"Y": OutputSpan(0, offset, byte_size)}, r".*outputs\[0\]: found")
            for offset, byte_size in [(0, 16), (4096, 16), (AT - 1, 16), (AT, 1 << 40)]
        ],
        (
            {"X": InputSpan(FP32, (4,), 0, AT, 16)},
            {"Y": OutputSpan(0, AT + 12, 16)},
            ".*outputs.Y: found bytes of another tensor",
        ),
    ],
)
def test_a_table_of_tensors_that_cannot_be_is_refused(
    session: ShmSession, client: Client, inputs: dict[str, InputSpan], outputs: dict[str, OutputSpan], complaint: str
) -> None:
    assert client.data == AT
    assert re.match(complaint, refused(session, client, Table(inputs, outputs)))


def test_strings_and_bytes_may_lie_anywhere_and_a_shape_without_elements_be_large(
    session: ShmSession, client: Client
) -> None:
    shape = (0, 2**31, 2**31)
    said = Table(
        {
            "TEXT": InputSpan(BYTES, (1,), 0, client.data + 1, 9),
            "CUBE": InputSpan(BY_NAME["UINT8"], shape, 0, client.data, 0),
        },
        {"WORDS": OutputSpan(0, client.data + 101, 9), "B": OutputSpan(0, client.data + 203, 9)},
    )
    shapes: list[tuple[int, ...]] = []

    def infer(call: Call) -> None:
        shapes.append(call.input("CUBE").numpy().shape)
        call.put("WORDS", ["a"])
        call.put("B", np.ones(3, np.uint8))

    assert answer(session, delivered(client.begin(said), ["WORDS", "B"]), infer) == ("", "")
    assert shapes == [shape]


def test_a_ring_for_a_model_that_has_no_streams_is_refused(session: ShmSession, client: Client) -> None:
    said = Table({}, {"Y": OutputSpan(0, client.data, 16)}, ring=Ring(1, 2, 256))
    assert refused(session, client, said).startswith("shm:table: frame_count: found 2, expected 0: model 'm' answers")


def test_a_slot_and_a_descriptor_are_one_too_many(session: ShmSession, client: Client) -> None:
    said = '{"v": 1, "model": "m", "regions": [], "inputs": {}, "outputs": {}}'
    code, text = answer(session, request_of(client, shm_io=said))
    assert (code, text.partition(": ")[0]) == ("INVALID_ARG", "shm:table")
    assert client.is_free()


def test_memory_may_end_with_the_region_and_not_one_byte_later(session: ShmSession, client: Client) -> None:
    end = client.region.header.byte_size

    def tables(at: int) -> dict[str, Table]:
        x, y = InputSpan(FP32, (4,), 0, at, 16), OutputSpan(0, at, 16)
        return {"inputs[0]": Table({"X": x}, {}), "outputs[0]": Table({}, {"Y": y})}

    for field, said in tables(end - 15).items():
        found = f"shm:table: {field}: found 16 bytes at offset {end - 15}, expected bytes from 8192 to {end}"
        assert refused(session, client, said).startswith(found)
    for last in tables(end - 16).values():
        assert answer(session, delivered(client.begin(last)), lambda call: None) == ("", "")


def test_a_table_that_is_none_is_refused(session: ShmSession, client: Client) -> None:
    for length in (0, 8, 23, 24):
        assert refused(session, client, b"\xff" * length + bytes(24 - length)).startswith("shm:table: ")


def test_random_tables_are_refused_or_served_and_nothing_else(session: ShmSession, client: Client) -> None:
    dice = np.random.default_rng(1)
    good = bytearray(table.encode(client.laid_out({"X": X}, {"Y": 16})))
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(dice.integers(1, 4)):
            bad[dice.integers(len(bad))] = dice.integers(256)
        code, text = answer(session, delivered(client.begin(bytes(bad)), []), lambda call: call.inputs)
        assert (code, text[:4]) in {("", ""), ("INVALID_ARG", "shm:"), ("NOT_FOUND", "shm:"), ("UNAVAILABLE", "shm:")}
        assert client.is_free()
    assert log_lines() == []


def test_a_slot_is_given_back_when_its_results_are_written_and_not_before(
    session: ShmSession, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the lease reads the results, or begins the next request over them."""
    give_back, seen = SlotLease.give_back, []

    def looked_at(lease: SlotLease) -> None:
        seen.append((client.region.record(0).completed, client.has_results()))
        give_back(lease)

    monkeypatch.setattr(SlotLease, "give_back", looked_at)
    assert answer(session, request_of(client)) == ("", "")
    assert seen == [(client.generations[0], True)]
