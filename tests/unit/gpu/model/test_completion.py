"""The end of an execute: GPUs are waited for once, or left to the client by its events; an error is every call's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.model import Call, ShmSession
from tests.unit.emulated import error_code, error_of, message_of, outputs_of
from tests.unit.gpu.fakes import DRIVER, MODEL, PATIENCE_S, array_on, collect_all, held_back, kernel, stream_on
from tests.unit.gpu.model.conftest import DEVICE, HOST, LONG_NAME, LONG_SHAPE, SHORTER_NAME, Calls

ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"
LONG = ("WIDE", SHORTER_NAME, LONG_NAME)

Infer = Callable[[Call], None]


def waits() -> list[int]:
    return [DRIVER.count(name, MODEL) for name in ("cuCtxSynchronize", "cuEventSynchronize")]


def double(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    np.multiply(x, 2, out=y.reshape(x.shape))


def double_into(stream: int, *names: str, is_named: bool = True) -> Infer:
    def infer(call: Call) -> None:
        x = call.input("X").array
        if is_named:
            call.ready_on(stream)
        for name in names:
            shape = LONG_SHAPE if name in LONG else x.shape
            kernel(stream, double, x, call.device_output(name, shape, x.dtype).array)

    return infer


@pytest.mark.parametrize(("is_named", "expected"), [(True, [0, 1]), (False, [1, 0])])
def test_one_execute_waits_once_for_all_its_calls(calls: Calls, is_named: bool, expected: list[int]) -> None:
    client = calls.client
    for slot in range(3):
        client.write(slot, slot + 1)
    DRIVER.forget()
    requests = [client.request(slot, {"Y": DEVICE, "Z": DEVICE}) for slot in range(3)]
    responses = calls.session.serve(requests, double_into(calls.stream, "Y", "Z", is_named=is_named))
    assert [response.error() for response in responses] == [None] * 3
    assert waits() == expected
    for slot in range(3):
        assert client.output(slot, "Y") == client.output(slot, "Z") == [2 * slot + 2] * 4
        assert client.is_over(slot)


@pytest.mark.parametrize(("is_named", "function"), [(True, "cuEventSynchronize"), (False, "cuCtxSynchronize")])
def test_a_kernel_that_fails_fails_every_call_in_flight(calls: Calls, is_named: bool, function: str) -> None:
    def infer(call: Call) -> None:
        double_into(calls.stream, "Y", is_named=is_named)(call)
        if call._slot is not None and call._slot.number == 2:
            DRIVER.fail_next(function, ILLEGAL, process=MODEL)

    responses = calls.session.serve([calls.client.request(slot, {"Y": DEVICE}) for slot in range(3)], infer)
    assert len({id(response) for response in responses}) == 3
    for slot, response in enumerate(responses):
        assert error_code(response) == "UNAVAILABLE"
        assert f"failed with {ILLEGAL}" in message_of(response)
        assert not calls.client.host.has_results(slot)
        assert calls.client.is_over(slot)
    calls.serve(double_into(calls.stream, "Y"), {"Y": DEVICE})


def test_a_call_that_raises_fails_alone_and_after_what_it_has_launched(calls: Calls) -> None:
    client, done = calls.client, list[str]()

    def infer(call: Call) -> None:
        double_into(calls.stream, "Y")(call)
        if not done:
            kernel(calls.stream, lambda _: done.append("what was launched"), call.input("X").array)
            raise ModelError("this call gives up")

    client.write(1, 3)
    failed, served = calls.session.serve([client.request(slot, {"Y": DEVICE}) for slot in (0, 1)], infer)
    assert message_of(failed) == "shm:model: this call gives up"
    assert done == ["what was launched"]
    assert served.error() is None
    assert client.output(1) == [6] * 4


def test_a_call_outside_of_serve_is_over_when_the_gpu_is_done(calls: Calls) -> None:
    calls.client.write(0, 3)
    with calls.session.open(calls.client.request(0, {"Y": DEVICE})) as call:
        double_into(calls.stream, "Y")(call)
    assert calls.client.output() == [6] * 4
    assert calls.client.is_over()


# By events


def test_a_response_leaves_while_the_gpu_works_and_the_client_waits_for_its_own_event(calls_by_events: Calls) -> None:
    client, stream = calls_by_events.client, calls_by_events.stream
    client.write(0, 21)
    with held_back(stream) as finish:
        calls_by_events.serve(double_into(stream, "Y"), {"Y": DEVICE})
        assert (waits(), client.is_over()) == ([0, 0], True)
        assert client.output() != [42] * 4
        finish.set()
        client.wait_for_events()
        assert client.output() == [42] * 4


def test_every_region_on_a_gpu_has_its_event_recorded(cuda: CudaRuntime, calls_by_events: Calls) -> None:
    client = calls_by_events.client
    client.write(0, 21)
    with stream_on(cuda, 1) as other:

        def infer(call: Call) -> None:
            double_into(calls_by_events.stream, "Y")(call)
            z = call.device_output("Z", (4,), np.float32)
            call.ready_on(other)
            with cuda.on(1):
                kernel(other, double, call.input("X").array, z.array)

        calls_by_events.serve(infer, {"Y": DEVICE, "Z": 1})
        assert client.events() == (1, 2)
        client.wait_for_events()
        assert client.output() == client.output(0, "Z") == [42] * 4


def test_sources_that_model_py_has_let_go_of_stay_until_they_were_copied(calls_by_events: Calls) -> None:
    client, gone = calls_by_events.client, list[str]()

    def infer(call: Call) -> None:
        source = array_on(calls_by_events.cuda, [7] * 4)
        weakref.finalize(source, gone.append, "the source")
        call.ready_on(calls_by_events.stream)
        call.put("Y", source)

    with held_back(calls_by_events.stream) as finish:
        calls_by_events.serve(infer, {"Y": DEVICE})
        assert (client.events(), gone) == ((1, 2), [])
        finish.set()
        client.wait_for_events()
    assert client.output() == [7] * 4
    collect_all(calls_by_events.cuda)
    assert gone == ["the source"]


CASES: dict[str, dict[str, Any]] = {
    "an output is on the host": {"outputs": {"Y": HOST}},
    "one of two outputs is on the host": {"outputs": {"Y": DEVICE, "Z": HOST}},
    "an output found no room": {"outputs": {"Y": DEVICE}, "room": 15},
    "the record has no room for events": {"outputs": {LONG_NAME: DEVICE, "WIDE": DEVICE}},
    "the client has no events": {"outputs": {"Y": DEVICE}, "event": b""},
    "model.py names no stream": {"outputs": {"Y": DEVICE}, "is_named": False},
    "the memory is lent for one request": {"outputs": {"Y": DEVICE}, "is_for_one_request": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_waits_where_the_client_could_not(calls_by_events: Calls, case: str) -> None:
    request = {"is_named": True, **CASES[case]}
    client, outputs, is_named = calls_by_events.client, request["outputs"], request.pop("is_named")
    client.write(1, 21)
    infer = double_into(calls_by_events.stream, *outputs, is_named=is_named)
    response = calls_by_events.serve(infer, slot=1, **request)
    assert client.events(1) == ()
    values = [array.reshape(-1).tolist() for array in outputs_of(response).values()]
    values += [client.output(1, name) for name, place in client.places(1).items() if not place.is_in_response]
    assert values == [[42] * 4] * len(outputs)
    assert client.host.is_free(1)


@pytest.mark.parametrize("use", [lambda call: call.to_device(call.input("X")), lambda call: None], ids=["read", "no"])
def test_the_model_waits_where_all_memory_is_the_hosts(calls_by_events: Calls, use: Infer) -> None:
    def infer(call: Call) -> None:
        call.ready_on(calls_by_events.stream)
        use(call)

    client = calls_by_events.client
    assert error_of(calls_by_events.session, client.host.request({"X": np.ones(4, np.float32)}, {}), infer) == ""
    assert client.events() == ()


def test_events_may_fill_the_record_to_its_last_byte(calls_by_events: Calls) -> None:
    outputs = {SHORTER_NAME: DEVICE, "WIDE": DEVICE}
    calls_by_events.serve(double_into(calls_by_events.stream, *outputs), outputs)
    assert calls_by_events.client.events() == (1, 2)


def test_the_model_waits_for_a_call_without_a_slot_as_that_has_no_results(calls_by_events: Calls) -> None:
    calls_by_events.client.write(1, 21)
    calls_by_events.serve(double_into(calls_by_events.stream, "Y"), {"Y": DEVICE}, slot=1, fenced=False)
    assert waits() == [0, 1]


def test_calls_of_one_execute_may_end_in_either_way(calls_by_events: Calls) -> None:
    client = calls_by_events.client
    requests = [client.request(slot, {"Y": place}) for slot, place in enumerate((DEVICE, HOST, DEVICE))]
    calls_by_events.session.serve(requests, double_into(calls_by_events.stream, "Y"))
    assert [len(client.events(slot)) for slot in range(3)] == [2, 0, 2]


def test_an_event_that_cannot_be_recorded_fails_the_call(calls_by_events: Calls) -> None:
    def infer(call: Call) -> None:
        double_into(calls_by_events.stream, "Y")(call)
        DRIVER.fail_next("cuEventRecord", ILLEGAL, process=MODEL)

    assert error_code(calls_by_events.response(infer, {"Y": DEVICE})) == "UNAVAILABLE"
    assert not calls_by_events.client.host.has_results(0)
    assert calls_by_events.client.is_over()


@pytest.mark.parametrize(
    "let_go",
    [lambda session: session._open_context().resolver.sweep(), lambda session: session.close()],
    ids=["looks after its mappings", "is closed"],
)
def test_memory_stays_mapped_although_the_session(calls_by_events: Calls, let_go: Callable[[ShmSession], None]) -> None:
    stream, region = calls_by_events.stream, calls_by_events.client.region
    with held_back(stream) as finish:
        calls_by_events.serve(double_into(stream, "Y"), {"Y": DEVICE})
        region.segment.unlink()
        letting_go = threading.Thread(target=let_go, args=(calls_by_events.session,))
        letting_go.start()
        letting_go.join(0.3)  # it may wait for the GPU, or come back to it later
        assert has_users(region.segment.fileno()), "the client would free what the GPU writes to"
        finish.set()
        letting_go.join(PATIENCE_S)
