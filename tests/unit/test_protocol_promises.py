"""What docs/protocol.md promises beyond tables and numbers, point by point, against the model half."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.address import SlotAddress
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_code, message_of, outputs_of, start_server
from tests.unit.table_client import Client

X = np.arange(4, dtype=np.float32)


def tensor(name: str, dtype: str = "FP32", optional: bool = True) -> dict[str, Any]:
    return {"name": name, "data_type": f"TYPE_{dtype}", "dims": [-1], "optional": optional}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    start_server(monkeypatch)
    config = {
        "name": "m",
        "input": [tensor("X"), tensor("WORDS", "STRING")],
        "output": [tensor("Y"), tensor("Z"), tensor("N", "INT64"), tensor("S", "STRING")],
    }
    session = ShmSession.from_args({"model_config": json.dumps(config)})
    yield session
    session.close()


@pytest.fixture(params=[RegionKind.SYSTEM, RegionKind.SEALED], ids=lambda kind: kind.value)
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """One with a region of each kind."""
    client = Client(kind=request.param)
    yield client
    client.close()


def double(call: Call) -> None:
    x = call.input("X").numpy()
    call.put("Y", x * 2)
    call.put("Z", x * 3)
    call.put("N", np.array([x.size]))
    call.put("S", ["text"])


def answer(session: ShmSession, request: InferenceRequest, infer: Callable[[Call], None] = double) -> Any:
    (response,) = session.serve([request], infer)
    return response


def refusal(session: ShmSession, request: InferenceRequest, infer: Callable[[Call], None] = double) -> tuple[str, str]:
    """Return the code of ours and Triton's that a request is refused with."""
    response = answer(session, request, infer)
    assert response.has_error()
    return code_in(message_of(response)), error_code(response)


def stamps(client: Client) -> tuple[int, int]:
    record = client.region.record(0)
    return record.started, record.completed


NOT_BEGUN = (0, 0)
DONE = (1, 1)


# What is wanted, and where it is


def test_of_one_name_in_the_table_and_as_a_tensor_the_table_counts(session: ShmSession, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16}, delivered={"X": X + 100})
    assert answer(session, request).error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]


def test_the_table_is_no_list_of_outputs(session: ShmSession, client: Client) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    response = answer(session, delivered(parameters, ["Y", "Z", "N"]))
    assert set(client.places()) == {"Y", "Z", "N"}
    assert {name: array.tolist() for name, array in outputs_of(response).items()} == {"Z": [0, 3, 6, 9], "N": [4]}


def test_room_for_an_output_that_is_not_wanted_stays_unused(session: ShmSession, client: Client) -> None:
    said = client.laid_out({"X": X}, {"Y": 16, "Z": 16})
    before = client.region.bytes().tobytes()[said.outputs["Z"].offset :]
    response = answer(
        session, delivered(client.begin(said), ["Y"]), lambda call: call.put("Y", call.input("X").numpy())
    )
    assert (response.error(), outputs_of(response), set(client.places())) == (None, {}, {"Y"})
    assert client.region.bytes().tobytes()[said.outputs["Z"].offset :] == before


# What names a slot


def test_a_wrong_token_of_a_file_is_refused_and_not_called_gone(session: ShmSession, client: Client) -> None:
    parameters = client.begin(client.laid_out({"X": X}, {"Y": 16}))
    parameters["shm_slot"] = str(SlotAddress("m", client.region.segment.key, "0" * 32, 0))
    is_sealed = parse_sealed_key(client.region.segment.key) is not None
    told = ("shm:gone", "NOT_FOUND") if is_sealed else ("shm:refused", "INVALID_ARG")
    assert refusal(session, delivered(parameters, ["Y"])) == told
    parameters["shm_slot"] = str(SlotAddress("m", "shmbu-none", "0" * 32, 0))
    assert refusal(session, delivered(parameters, ["Y"])) == ("shm:gone", "NOT_FOUND")
    assert stamps(client) == NOT_BEGUN


# What an error means for the slot


def test_a_model_that_fails_completes_the_generation_without_results(session: ShmSession, client: Client) -> None:
    def fail(call: Call) -> None:
        raise RuntimeError("shm:stale: of another request")

    response = answer(session, client.request({"X": X}, {"Y": 16}), fail)
    assert message_of(response) == "RuntimeError: shm:stale: of another request"
    assert code_in(message_of(response)) == ""
    assert stamps(client) == DONE
    assert not client.has_results()
    assert client.is_free()


def test_a_missing_input_is_found_out_after_the_start(session: ShmSession, client: Client) -> None:
    assert refusal(session, client.request({}, {"Y": 16})) == ("shm:missing", "INVALID_ARG")
    assert stamps(client) == DONE


# The region, and the rest
