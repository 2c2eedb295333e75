"""The end of an execute: GPUs are waited for once, or complete the call themselves; an error is every call's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.locks import _flock, has_users, is_slot_in_use
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.spans import OutputSpan
from tests.unit.claims_of import claim_of_allocation
from tests.unit.emulated import delivered, error_code, error_of, message_of, outputs_of
from tests.unit.gpu.fakes import DRIVER, MODEL, array_on, collect_all, held_back, kernel, stream_on, wait_until
from tests.unit.gpu.model.conftest import DEVICE, HOST, LONG_NAME, LONG_SHAPE, SHORTER_NAME, Calls, Client, calls_of

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


# After the answer


def test_a_response_leaves_while_the_gpu_works_which_completes_the_slot_itself(early_calls: Calls) -> None:
    client, stream = early_calls.client, early_calls.stream
    record = client.region.record(0)
    client.write(0, 21)
    with held_back(stream) as finish:
        early_calls.serve(double_into(stream, "Y"), {"Y": DEVICE})
        assert (waits(), client.events(), record.is_at_rest) == ([0, 0], (1, 2), False)
        assert is_at_work(client), "the client would take this model for dead"
        assert client.output() != [42] * 4
        finish.set()
        client.wait_for_gpus()
        assert client.output() == [42] * 4
    wait_until(lambda: is_given_back(early_calls))


def is_given_back(calls: Calls) -> bool:
    calls.session._open_context().resolver._cuda.collect()
    return not is_at_work(calls.client)


def is_at_work(client: Client) -> bool:
    return is_slot_in_use(client.region.segment.fileno(), client.region.record_offset(0))


def test_streams_of_all_gpus_come_before_the_slot_is_completed(cuda: CudaRuntime, early_calls: Calls) -> None:
    client = early_calls.client
    client.write(0, 21)
    with stream_on(cuda, 1) as other:

        def infer(call: Call) -> None:
            double_into(early_calls.stream, "Y")(call)
            z = call.device_output("Z", (4,), np.float32)
            call.ready_on(other)
            with cuda.on(1):
                kernel(other, double, call.input("X").array, z.array)

        early_calls.serve(infer, {"Y": DEVICE, "Z": 1})
        assert client.events() == (1, 2)
        client.wait_for_gpus()
        assert client.output() == client.output(0, "Z") == [42] * 4


def test_sources_that_model_py_has_let_go_of_stay_until_they_were_copied(early_calls: Calls) -> None:
    client, gone = early_calls.client, list[str]()

    def infer(call: Call) -> None:
        source = array_on(early_calls.cuda, [7] * 4)
        weakref.finalize(source, gone.append, "the source")
        call.ready_on(early_calls.stream)
        call.put("Y", source)

    with held_back(early_calls.stream) as finish:
        early_calls.serve(infer, {"Y": DEVICE})
        assert (client.events(), gone) == ((1, 2), [])
        finish.set()
        client.wait_for_gpus()
    assert client.output() == [7] * 4
    collect_all(early_calls.cuda)
    assert gone == ["the source"]


CASES: dict[str, dict[str, Any]] = {
    "an output is on the host": {"outputs": {"Y": HOST}},
    "one of two outputs is on the host": {"outputs": {"Y": DEVICE, "Z": HOST}},
    "an output found no room": {"outputs": {"Y": DEVICE}, "room": 15},
    "the record has no room for events": {"outputs": {LONG_NAME: DEVICE, "WIDE": DEVICE}},
    "the client does not wait": {"outputs": {"Y": DEVICE}, "waits": False},
    "model.py names no stream": {"outputs": {"Y": DEVICE}, "is_named": False},
    "the memory is lent for one request": {"outputs": {"Y": DEVICE}, "is_for_one_request": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_waits_where_the_client_could_not(early_calls: Calls, case: str) -> None:
    request = {"is_named": True, **CASES[case]}
    client, outputs, is_named = early_calls.client, request["outputs"], request.pop("is_named")
    client.write(1, 21)
    infer = double_into(early_calls.stream, *outputs, is_named=is_named)
    response = early_calls.serve(infer, slot=1, **request)
    assert client.events(1) == ()
    values = [array.reshape(-1).tolist() for array in outputs_of(response).values()]
    values += [client.output(1, name) for name, place in client.places(1).items() if not place.is_in_response]
    assert values == [[42] * 4] * len(outputs)
    assert client.host.is_free(1)


def test_the_model_waits_for_a_copy_of_pinned_memory(client: Client, cuda: Any, monkeypatch: Any) -> None:
    read = list[float]()

    def infer(call: Call) -> None:
        x, y = call.input("X").numpy(), call.output("Y", (4,), np.float32)
        call.ready_on(calls.stream)
        kernel(calls.stream, lambda _: read.extend(x.tolist()), y.array)

    with calls_of(cuda, client, monkeypatch, gpu_events=True, pin_host_memory=True) as calls:
        calls.serve(lambda call: None)
        said = client.host.laid_out({"X": np.full(4, 21, np.float32)}, {}, 1)
        on_gpus = tuple(claim_of_allocation(each, fence=0) for each in client.allocations)
        said = said._replace(outputs={"Y": OutputSpan(1, 512, 16)}, regions=on_gpus)
        with held_back(calls.stream) as finish:
            threading.Timer(0.3, finish.set).start()
            (response,) = calls.session.serve([delivered(client.host.begin(said, 1), ["Y"])], infer)
            client.host.laid_out({"X": np.full(4, 99, np.float32)}, {}, 1)  # the client fills the input again
        client.wait_for_gpus(1)
    assert (response.error(), client.events(1), read) == (None, (), [21] * 4)


@pytest.mark.parametrize("use", [lambda call: call.to_device(call.input("X")), lambda call: None], ids=["read", "no"])
def test_the_model_waits_where_all_memory_is_the_hosts(early_calls: Calls, use: Infer) -> None:
    def infer(call: Call) -> None:
        call.ready_on(early_calls.stream)
        use(call)

    client = early_calls.client
    assert error_of(early_calls.session, client.host.request({"X": np.ones(4, np.float32)}, {}), infer) == ""
    assert client.events() == ()


def test_events_may_fill_the_record_to_its_last_byte(early_calls: Calls) -> None:
    outputs = {SHORTER_NAME: DEVICE, "WIDE": DEVICE}
    early_calls.serve(double_into(early_calls.stream, *outputs), outputs)
    assert early_calls.client.events() == (1, 2)


def test_the_model_waits_for_a_call_without_a_slot_as_that_has_no_results(early_calls: Calls) -> None:
    early_calls.client.write(1, 21)
    early_calls.serve(double_into(early_calls.stream, "Y"), {"Y": DEVICE}, slot=1, fenced=False)
    assert waits() == [0, 1]


def test_calls_of_one_execute_may_end_in_either_way(early_calls: Calls) -> None:
    client = early_calls.client
    requests = [client.request(slot, {"Y": place}) for slot, place in enumerate((DEVICE, HOST, DEVICE))]
    early_calls.session.serve(requests, double_into(early_calls.stream, "Y"))
    assert [len(client.events(slot)) for slot in range(3)] == [2, 0, 2]


def test_a_gpu_that_fails_before_the_answer_fails_the_call(early_calls: Calls) -> None:
    def infer(call: Call) -> None:
        double_into(early_calls.stream, "Y")(call)
        DRIVER.fail_next("cuStreamWriteValue64", ILLEGAL, process=MODEL)

    assert error_code(early_calls.response(infer, {"Y": DEVICE})) == "UNAVAILABLE"
    assert not early_calls.client.host.has_results(0)
    assert early_calls.client.is_over()


LACKING = {
    "cuDeviceGetAttribute": "CUDA_ERROR_INVALID_VALUE",
    "cuMemHostRegister": "CUDA_ERROR_OUT_OF_MEMORY",
    "cuMemHostGetDevicePointer": "CUDA_ERROR_INVALID_VALUE",
    "cuStreamWriteValue64": "CUDA_ERROR_NOT_SUPPORTED",
}


@pytest.mark.parametrize("function", LACKING)
def test_the_host_waits_if_no_gpu_can_complete_the_slot(calls: Calls, monkeypatch: Any, function: str) -> None:
    client = calls.client
    with calls_of(calls.cuda, client, monkeypatch, gpu_events=True) as early_calls:
        client.write(0, 21)
        DRIVER.fail_next(function, LACKING[function], times=9, process=MODEL)
        early_calls.serve(double_into(early_calls.stream, "Y"), {"Y": DEVICE})
        assert (client.events(), client.is_over(), client.output()) == ((), True, [42] * 4)


def test_the_host_waits_if_the_client_has_locked_the_lease_of_the_gpu(early_calls: Calls) -> None:
    client = early_calls.client
    client.write(0, 21)
    region = client.region
    own = Descriptor(os.open, f"/proc/self/fd/{region.segment.fileno()}", os.O_RDWR)
    with contextlib.closing(own) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, region.record_offset(0) + 2))
        early_calls.serve(double_into(early_calls.stream, "Y"), {"Y": DEVICE})
    assert (client.events(), client.is_over(), client.output()) == ((), True, [42] * 4)


def test_records_that_are_pinned_already_are_not_pinned_again(client: Client, cuda: Any, monkeypatch: Any) -> None:
    with calls_of(cuda, client, monkeypatch, gpu_events=True, pin_host_memory=True) as calls:
        with held_back(calls.stream) as finish:
            calls.serve(double_into(calls.stream, "Y"), {"Y": DEVICE})
            client.region.segment.unlink()
            calls.session._open_context().resolver.registry.drop_abandoned()
            assert (client.events(), DRIVER.live(MODEL).pinned) == ((1, 2), 1)
            finish.set()
        client.wait_for_gpus()


@pytest.mark.parametrize("error", [ILLEGAL, "CUDA_ERROR_UNKNOWN"])
def test_a_gpu_that_fails_after_the_answer_leaves_a_dead_models_slot(early_calls: Calls, error: str) -> None:
    client = early_calls.client
    early_calls.serve(double_into(early_calls.stream, "Y"), {"Y": DEVICE})  # makes memory
    wait_until(lambda: is_given_back(early_calls))
    with held_back(early_calls.stream):
        early_calls.serve(double_into(early_calls.stream, "Y"), {"Y": DEVICE})
        DRIVER.fail_next("cuStreamQuery", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", process=MODEL)
        assert not is_given_back(early_calls)
        DRIVER.fail_next("cuStreamQuery", error, process=MODEL)
        wait_until(lambda: is_given_back(early_calls))
        assert not client.region.record(0).is_at_rest
    client.wait_for_gpus()


@pytest.mark.parametrize(
    "let_go",
    [lambda session: session._open_context().resolver.sweep(), lambda session: session.close()],
    ids=["looks after its mappings", "is closed"],
)
def test_memory_stays_mapped_although_the_session(early_calls: Calls, let_go: Callable[[ShmSession], None]) -> None:
    stream, region = early_calls.stream, early_calls.client.region
    with held_back(stream) as finish:
        early_calls.serve(double_into(stream, "Y"), {"Y": DEVICE})
        region.segment.unlink()
        letting_go = threading.Thread(target=let_go, args=(early_calls.session,))
        letting_go.start()
        letting_go.join(0.3)  # it may wait for the GPU, or come back to it later
        assert has_users(region.segment.fileno()), "the client would free what the GPU writes to"
        finish.set()
        letting_go.join(20)
