"""Calls from model to model, both in the test's process: on the client's memory, and by ordinary requests."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.dtypes import BF16
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.model import Call
from shm_backend_utils.protocol.parameters import GENERATION_PARAMETER, SLOT_PARAMETER
from shm_backend_utils.protocol.probe import ALIVE_ADDRESS
from shm_backend_utils.testing.emulator.request import InferenceRequest
from shm_backend_utils.testing.emulator.response import InferenceResponse
from tests.unit.emulated import answered, delivered, message_of, outputs_of
from tests.unit.forwarding.conftest import Models, X, config, two_models
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client


def address(array: Any) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def test_the_other_model_reads_and_writes_the_clients_memory(models: Models, client: Client) -> None:
    seen: list[bool] = []

    def answer(call: Call) -> None:
        begin = call._memories[1].address + client.data
        seen.append(address(call.input("X").numpy()) == begin)
        y = call.output("Y", (4,), np.float32)
        seen.append(address(y.numpy()) == begin + 256)
        y.numpy()[:] = 7

    def infer(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        assert call.forward("other", {"X": call.input("X")}, {"Y": y})["Y"] is y

    models.answer = answer
    assert models.serve(client, infer).error() is None
    assert seen == [True, True]
    assert client.output("Y").tolist() == [7] * 4


def test_what_lies_elsewhere_is_copied_to_where_it_is_wanted(models: Models, client: Client) -> None:
    def infer(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)  # the client has no room for it: memory of the model's own
        assert call.forward("other", {"X": X}, {"Y": y})["Y"] is y

    def infer_with_the_clients(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        y.numpy()[:] = 0
        assert call.forward("other", {"X": call.input("X")}, {"Y": y})["Y"] is y

    assert outputs_of(models.serve(client, infer, room=0))["Y"].tolist() == (X * 2).tolist()
    models.answer = lambda call: call.put("Y", call.input("X"))  # passes it through
    assert models.serve(client, infer_with_the_clients).error() is None
    assert client.output("Y").tolist() == X.tolist()


@pytest.mark.parametrize("x", [X.astype(np.int32), X.reshape(2, 2)])
def test_an_input_that_is_not_taken_there_is_not_sent(monkeypatch: pytest.MonkeyPatch, client: Client, x: Any) -> None:
    calls: list[Call] = []
    with two_models(monkeypatch, config("other", "direct,inline")) as models:
        models.answer = calls.append
        assert "'X'" in models.refused(client, lambda call: call.forward("other", {"X": x}))
    assert calls == []


@pytest.mark.parametrize("paths", ["direct", ""])
@pytest.mark.parametrize("room", [64, 4])
def test_strings_go_there_and_come_back(monkeypatch: pytest.MonkeyPatch, client: Client, paths: str, room: int) -> None:
    other = config("other", paths, input=[tensor("X", "STRING")], output=[tensor("Y", "STRING")])
    words, found = [b"ab", b"", b"cde\0"], []

    def infer(call: Call) -> None:
        given: Any = np.array(words, object)
        for _ in range(2):  # the second time it is a view
            given = call.forward("other", {"X": given}, {"Y": room})["Y"]
            found.append(given.numpy().tolist())
        call.put("Y", X)

    with two_models(monkeypatch, other) as models:
        models.answer = lambda call: call.put("Y", call.input("X").numpy())
        assert models.serve(client, infer).error() is None
    assert found == [words] * 2


def test_a_batch_says_how_many_rows_it_has(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    batched = config("other", max_batch_size=4)
    batched["input"].append(tensor("SHM", "UINT8"))
    rows: list[int] = []

    def answer(call: Call) -> None:
        rows.append(call.batch_size)
        double(call)

    def infer(call: Call) -> None:
        y = call.forward("other", {"X": X.reshape(2, 2)}, {"Y": np.int64(16)})["Y"].numpy()
        call.put("Y", y.ravel())

    with two_models(monkeypatch, batched) as models:
        models.answer = answer
        assert models.serve(client, infer).error() is None
    assert rows == [2]
    assert client.output("Y").tolist() == (X * 2).tolist()


def test_a_model_that_would_be_called_on_its_own_behalf_over_others_is_refused(models: Models, client: Client) -> None:
    models.answer = lambda call: call.forward("first", {})
    request = client.request({"X": X}, {"Y": 16}, shm_callers="first")
    (response,) = models.caller.serve([request], lambda call: call.forward("other", {"X": X}, {"Y": 16}))
    assert "would be called on its own behalf (first → m → other → first)" in message_of(response)


def own_regions() -> set[Path]:
    return {*Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")}


def test_a_region_whose_name_is_gone_is_replaced_and_the_call_made_again(models: Models, client: Client) -> None:
    def infer(call: Call) -> None:
        first = call.forward("other", {"X": X}, {"Y": 16})["Y"]
        for region in lost:  # what lies there is to be read, and to be lent
            region.unlink(missing_ok=True)  # the pool has unlinked by now what it had in quarantine
        call.put("Y", call.forward("other", {"X": first}, {"Y": 16})["Y"])

    before, lost = own_regions(), set[Path]()
    assert models.serve(client, infer).error() is None
    for _ in range(2):
        lost = own_regions() - before
        assert models.serve(client, infer).error() is None
        assert client.output("Y").tolist() == (X * 4).tolist()


def test_calls_that_fail_for_memory_are_warned(models: Models, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(call: Call) -> None:
        call.put("Y", call.forward("other", {"X": X}, {"Y": 16})["Y"])

    def sign_of_life() -> str:
        (response,) = models.caller.serve([delivered({SLOT_PARAMETER: ALIVE_ADDRESS, GENERATION_PARAMETER: 1})], infer)
        return message_of(response)

    with monkeypatch.context() as patched:
        patched.setattr(models, "execute", lambda _: answered([], "shm:gone: the memory is not there"))
        for _ in range(3):
            assert sign_of_life() == ""
            assert models.refused(client, infer).startswith("shm:forward: ")
        assert sign_of_life().startswith("shm:machine: the last 3 calls of other models (call.forward) failed")
    assert models.serve(client, infer).error() is None
    assert sign_of_life() == ""


def test_an_answer_without_use_of_the_memory(models: Models, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, execute, models.answer = list[InferenceRequest](), models.execute, None

    def noting(request: InferenceRequest) -> InferenceResponse:
        sent.append(request)
        return execute(request)

    monkeypatch.setattr(models, "execute", noting)
    error = models.refused(client, lambda call: call.forward("other", {"X": X}, {"Y": 16}))
    assert "answered without having used the shared memory" in error
    (late,) = models.other.serve(sent, double)
    assert message_of(late).startswith("shm:stale: ")


def test_a_session_that_is_closed_meanwhile_is_told_so(models: Models, client: Client) -> None:
    models.change = lambda outputs: models.caller.close()
    error = models.refused(client, lambda call: call.forward("other", {"X": X}, {"Y": 16}))
    assert error.startswith("shm:closed: this model's session is closed")


def test_what_is_read_only_is_not_written_to_and_what_is_not_told_is_missed(models: Models, client: Client) -> None:
    error = models.refused(client, lambda call: call.forward("other", {"X": X + 1}, {"Y": call.input("X")}))
    assert "read-only" in error
    assert client.region.bytes()[client.data :][:16].view(np.float32).tolist() == X.tolist()

    def answer(call: Call) -> None:
        double(call)
        call._requested = ["another"]

    models.answer = answer
    error = models.refused(client, lambda call: call.forward("other", {"X": X}, {"Y": 16}))
    assert "model 'other'" in error
    assert "output 'Y'" in error


def test_more_than_the_pool_may_have_fails(models: Models, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = models.caller._context.forwarder._pool  # type: ignore[union-attr]
    monkeypatch.setattr(pool, "options", PoolOptions(region="system", max_bytes=16384))
    monkeypatch.setattr(pool._inventory, "max_bytes", 16384)  # what is allowed is looked at once in a while

    def infer(call: Call) -> None:
        held = call.forward("other", {"X": X}, {"Y": 16})
        call.forward("other", {"X": X}, {"Y": 16})
        del held

    for _ in range(2):  # who was refused does not wait for memory any more
        assert "bytes of shared memory became free within 0 s" in models.refused(client, infer)
        assert models.serve(client, lambda call: call.put("Y", call.forward("other", {"X": X})["Y"])).error() is None


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [("ratio", 0.5, "is 0.5, which this Triton"), ("shm_slot", "m", "is written by the session")],
)
@pytest.mark.parametrize("serving", ["models", "stock_models"])
def test_a_parameter_that_is_not_passed_on_fails(
    serving: str, name: str, value: Any, refusal: str, client: Client, request: pytest.FixtureRequest
) -> None:
    models: Models = request.getfixturevalue(serving)

    def infer(call: Call) -> None:
        call.forward("other", {"X": X}, ["Y"], parameters={"count": 2, name: value})

    assert f"parameter {name!r} {refusal}" in models.refused(client, infer)


def test_delivered_outputs_have_the_shape_of_their_memory_and_names(stock_models: Models, client: Client) -> None:
    def infer(call: Call) -> None:
        y = call.output("Y", (1,), np.float32)  # NumPy would spread one element over four, but not the other way
        call.forward("other", {"X": X}, {"Y": y})

    assert "gave output 'Y' as FP32 of shape [4], but the memory" in stock_models.refused(client, infer)

    def spreading(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        call.forward("other", {"X": X[:1]}, {"Y": y})

    assert "gave output 'Y' as FP32 of shape [1], but the memory" in stock_models.refused(client, spreading)

    def fitting(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        assert call.forward("other", {"X": call.input("X")}, {"Y": y})["Y"] is y

    assert stock_models.serve(client, fitting).error() is None
    assert client.output("Y").tolist() == (X * 2).tolist()
    error = stock_models.refused(client, lambda call: call.forward("other", {"X": X}))
    assert "the outputs of model 'other' are not known here" in error
    assert "name the outputs, or set the parameter SHM_SERVER_URL" in error


@pytest.mark.parametrize("outputs", [[], {}, iter(()), "Y", 3, [1], {"Y": -1}, {"Y": "16"}, {"Y": 1.5}])
def test_outputs_that_no_model_can_be_asked_for(models: Models, client: Client, outputs: Any) -> None:
    error = models.refused(client, lambda call: call.forward("other", {"X": X}, outputs))
    assert re.search("model 'other' cannot be called with these outputs: outputs (is|has) .*(expected|leave)", error)


def leave_while_under_way(models: Models, client: Client, error: type[BaseException] | None = None) -> Any:
    """Serve a request whose forward_async goes on; return the response, and how the other model's call ended."""

    async def run() -> Any:
        models.gate.clear()
        tasks: list[asyncio.Task[Any]] = []

        async def infer(call: Call) -> None:
            y = call.output("Y", (4,), np.float32)
            tasks.append(asyncio.ensure_future(call.forward_async("other", {"X": call.input("X")}, {"Y": y})))
            await asyncio.sleep(0)
            if error is not None:
                raise error

        (response,) = await models.caller.serve_async([client.request({"X": X}, {"Y": 16})], infer)
        models.gate.set()
        (outcome,) = await asyncio.gather(*tasks, return_exceptions=True)
        return response, outcome

    return asyncio.run(run())


def test_a_call_that_is_left_while_forward_async_runs_fails(models: Models, client: Client) -> None:
    response, outcome = leave_while_under_way(models, client)
    assert "model.py has left the call while 1 calls of other models were under way" in message_of(response)
    assert "the client has given this request up" in str(outcome)  # the other model did not touch the memory
    assert client.is_free()
    response, outcome = leave_while_under_way(models, client, ValueError)
    assert "ValueError" in message_of(response)
    assert isinstance(outcome, Exception)
    assert client.is_free()
    assert client.region.record(0).completed == 0, "the record is the client's"


def test_forward_async_that_failed_is_over(models: Models, client: Client) -> None:
    def broken(outputs: object) -> None:
        raise OSError("the other model's process died")

    async def infer(call: Call) -> None:
        with pytest.raises(OSError, match="died"):
            await call.forward_async("other", {"X": call.input("X")})
        call.output("Y", (4,), np.float32)

    models.change = broken
    (response,) = asyncio.run(models.caller.serve_async([client.request({"X": X}, {"Y": 16})], infer))
    assert response.error() is None


def test_a_decoupled_model_is_not_called(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    """The Python backend does not tell a model of the errors of one that it calls for a stream."""
    decoupled = config("other", model_transaction_policy={"decoupled": True})
    with two_models(monkeypatch, decoupled) as models:
        message = models.refused(client, lambda call: call.put("Y", call.forward("other", {"X": X}, ["Y"])["Y"]))
    assert "model 'other' is decoupled: it answers with any number of responses" in message
    assert "let the client call it (ShmClient.stream), or give it a version that answers once" in message


UNLIKE: Final[dict[str, tuple[dict[str, Any], Any]]] = {
    "another type": (tensor("Y", "INT64"), np.zeros(4, np.int64)),
    "another size": (tensor("Y"), X[:3]),
    "another rank": ({**tensor("Y"), "dims": [-1, -1]}, np.zeros((2, 2), np.float32)),
    "strings": (tensor("Y", "STRING"), np.array([b"x"], object)),
    "a type that NumPy does not have": (tensor("Y", "BF16"), np.zeros(4, BF16.numpy)),
    "another name": (tensor("Z"), X),
}
"""What the other model gives in place of four numbers Y."""


@pytest.mark.parametrize("paths", ["direct", ""])
@pytest.mark.parametrize("room", [64, 0])
@pytest.mark.parametrize(("output", "value"), UNLIKE.values(), ids=UNLIKE)
def test_an_answer_unlike_the_other_models_configuration_is_that_models_error(
    monkeypatch: pytest.MonkeyPatch, client: Client, paths: str, room: int, output: dict[str, Any], value: Any
) -> None:
    def infer(call: Call) -> None:
        with pytest.raises(PeerError, match="'Y'") as caught:
            call.forward("other", {"X": X}, {"Y": room})
        assert "without output" not in str(caught.value) or output["name"] != "Y"
        call.put("Y", X)

    told = config("other", paths, output=[{**tensor("Y"), "dims": [4]}])
    with two_models(monkeypatch, config("other", paths, output=[output]), told) as models:
        models.answer = lambda call: call.put(output["name"], value)
        assert models.serve(client, infer).error() is None
