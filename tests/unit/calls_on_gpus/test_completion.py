"""The end of an execute: GPUs are waited for once, or left to the client by its events; an error is every call's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.config import Config
from tests.unit.calls_on_gpus.device_calls import DEVICE, HOST, LONG_NAME, LONG_SHAPE, SHORTER_NAME, Client, session_on
from tests.unit.emulated import error_code, message_of, outputs_of
from tests.unit.fake_gpu import DRIVER, MODEL, array_on, held_back, kernel, stream_on, wait_until
from tests.unit.gpus import PATIENCE_S

ON_GPU = {"Y": DEVICE, "Z": DEVICE}
ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"
WAITS = ("cuCtxSynchronize", "cuStreamSynchronize")

Infer = Callable[[Call], None]


def waits() -> list[int]:
    """Return how often the model has waited for a whole GPU, and for a stream."""
    return [DRIVER.count(name, MODEL) for name in WAITS]


# In a session


@pytest.fixture
def session_with_events(cuda: CudaRuntime, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmSession]:
    """A session that has served before."""
    session = session_on(cuda, monkeypatch, gpu_events=True)
    session.serve([client.request(0, {})], lambda call: None)
    DRIVER.forget()
    yield session
    session.close()


def double(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    np.multiply(x, 2, out=y.reshape(x.shape))


def double_into(stream: int, *names: str, is_named: bool = True, late_s: float = 0.01) -> Infer:
    def infer(call: Call) -> None:
        x = call.input("X").array
        if is_named:
            call.ready_on(stream)
        for name in names:
            shape = LONG_SHAPE if name in ("WIDE", SHORTER_NAME, LONG_NAME) else x.shape
            kernel(stream, double, x, call.device_output(name, shape, x.dtype).array, late_s=late_s)

    return infer


@pytest.mark.parametrize(("is_named", "expected"), [(True, [0, 1]), (False, [1, 0])])
def test_one_execute_waits_once_for_all_its_calls_and_tensors(
    client: Client, session: ShmSession, stream: int, is_named: bool, expected: list[int]
) -> None:
    for slot in range(3):
        client.write(slot, slot + 1)
    DRIVER.forget()
    requests = [client.request(slot, ON_GPU) for slot in range(3)]
    responses = session.serve(requests, double_into(stream, "Y", "Z", is_named=is_named))
    assert [response.error() for response in responses] == [None] * 3
    assert waits() == expected
    for slot in range(3):
        assert client.output(slot, "Y") == client.output(slot, "Z") == [2 * slot + 2] * 4
        assert client.is_over(slot)


@pytest.mark.parametrize(("is_named", "function"), [(True, "cuStreamSynchronize"), (False, "cuCtxSynchronize")])
def test_a_kernel_that_fails_is_told_in_a_response_of_every_call_in_flight(
    client: Client, session: ShmSession, stream: int, is_named: bool, function: str
) -> None:
    requests = [client.request(slot, {"Y": DEVICE}) for slot in range(3)]

    def infer(call: Call) -> None:
        double_into(stream, "Y", is_named=is_named)(call)
        if call._slot is not None and call._slot.number == 2:
            DRIVER.fail_next(function, ILLEGAL, process=MODEL)

    responses = session.serve(requests, infer)
    assert len({id(response) for response in responses}) == 3
    for slot, response in enumerate(responses):
        assert error_code(response) == "UNAVAILABLE"
        assert f"failed with {ILLEGAL}" in message_of(response)
        assert not client.host.has_results(slot)
        assert client.is_over(slot)
    (response,) = session.serve([client.request(0, {"Y": DEVICE})], double_into(stream, "Y"))
    assert response.error() is None


def test_a_call_that_raises_fails_alone_and_after_what_it_has_launched(
    client: Client, session: ShmSession, stream: int
) -> None:
    done: list[str] = []

    def infer(call: Call) -> None:
        double_into(stream, "Y")(call)
        if not done:
            kernel(stream, lambda _: done.append("what was launched"), call.input("X").array)
            raise ModelError("this call gives up")

    client.write(1, 3)
    failed, served = session.serve([client.request(slot, {"Y": DEVICE}) for slot in (0, 1)], infer)
    assert message_of(failed) == "shm:model: this call gives up"
    assert done == ["what was launched"]
    assert served.error() is None
    assert client.output(1, "Y") == [6] * 4


def test_a_call_outside_of_serve_is_over_when_the_gpu_is_done(client: Client, session: ShmSession, stream: int) -> None:
    client.write(0, 3)
    with session.open(client.request(0, {"Y": DEVICE})) as call:
        double_into(stream, "Y")(call)
    assert client.output(0, "Y") == [6] * 4
    assert client.is_over(0)


# By events


def test_a_response_leaves_while_the_gpu_works_and_the_client_waits_for_its_own_event(
    client: Client, session_with_events: ShmSession, stream: int
) -> None:
    client.write(0, 21)
    with held_back(stream) as finish:
        (response,) = session_with_events.serve([client.request(0, {"Y": DEVICE})], double_into(stream, "Y"))
        assert response.error() is None
        assert (waits(), client.is_over(0)) == ([0, 0], True)
        assert client.output(0, "Y") != [42] * 4
        finish.set()
        client.wait_for_events(0)
        assert client.output(0, "Y") == [42] * 4


def test_every_region_on_a_gpu_has_its_event_recorded(
    cuda: CudaRuntime, client: Client, session_with_events: ShmSession, stream: int
) -> None:
    client.write(0, 21)
    with stream_on(cuda, 1) as other:

        def infer(call: Call) -> None:
            double_into(stream, "Y")(call)
            z = call.device_output("Z", (4,), np.float32)
            call.ready_on(other)
            with cuda.on(1):
                kernel(other, double, call.input("X").array, z.array)

        (response,) = session_with_events.serve([client.request(0, {"Y": DEVICE, "Z": 1})], infer)
        assert response.error() is None
        assert client.events(0) == (1, 2)
        client.wait_for_events(0)
        assert client.output(0, "Y") == client.output(0, "Z") == [42] * 4


def test_sources_that_model_py_has_let_go_of_stay_until_they_were_copied(
    cuda: CudaRuntime, client: Client, session_with_events: ShmSession, stream: int
) -> None:
    gone: list[str] = []

    def infer(call: Call) -> None:
        source = array_on(cuda, [7] * 4)
        weakref.finalize(source, gone.append, "the source")
        call.ready_on(stream)
        call.put("Y", source)

    with held_back(stream) as finish:
        (response,) = session_with_events.serve([client.request(0, {"Y": DEVICE})], infer)
        assert response.error() is None
        assert (client.events(0), gone) == ((1, 2), [])
        finish.set()
        client.wait_for_events(0)
    assert client.output(0, "Y") == [7] * 4
    wait_until(lambda: not cuda.retired.collect())
    assert gone == ["the source"]


CASES: dict[str, dict[str, Any]] = {
    "an output is on the host": {"outputs": {"Y": HOST}},
    "one of two outputs is on the host": {"outputs": {"Y": DEVICE, "Z": HOST}},
    "an output found no room": {"outputs": {"Y": DEVICE}, "room": 15},
    "the record has no room for events": {"outputs": {LONG_NAME: DEVICE, "WIDE": DEVICE}},
    "the client has no events": {"outputs": {"Y": DEVICE}, "event": b""},
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_waits_where_the_client_could_not(
    client: Client, session_with_events: ShmSession, stream: int, case: str
) -> None:
    client.write(1, 21)
    outputs = CASES[case]["outputs"]
    (response,) = session_with_events.serve([client.request(1, **CASES[case])], double_into(stream, *outputs))
    assert response.error() is None
    assert client.events(1) == ()
    values = [array.reshape(-1).tolist() for array in outputs_of(response).values()]
    values += [client.output(1, name) for name, place in client.places(1).items() if not place.is_in_response]
    assert values == [[42] * 4] * len(outputs)


@pytest.mark.parametrize("use", [lambda call: call.to_device(call.input("X")), lambda call: None], ids=["read", "no"])
def test_the_model_waits_where_memory_of_the_host_is_still_to_be_read_and_where_no_other_is_used(
    client: Client, session_with_events: ShmSession, stream: int, use: Infer
) -> None:
    x = np.arange(4, dtype=np.float32)

    def infer(call: Call) -> None:
        call.ready_on(stream)
        use(call)

    (response,) = session_with_events.serve([client.host.request({"X": x}, {})], infer)
    assert response.error() is None
    assert client.events(0) == ()


def test_events_may_fill_the_record_to_its_last_byte(
    client: Client, session_with_events: ShmSession, stream: int
) -> None:
    outputs = {SHORTER_NAME: DEVICE, "WIDE": DEVICE}
    session_with_events.serve([client.request(0, outputs)], double_into(stream, *outputs))
    assert client.events(0) == (1, 2)


def test_the_model_waits_for_a_call_without_a_slot_as_that_has_no_results(
    client: Client, session_with_events: ShmSession, stream: int
) -> None:
    client.write(1, 21)
    request = client.request(1, {"Y": DEVICE}, fenced=False)
    (response,) = session_with_events.serve([request], double_into(stream, "Y"))
    assert response.error() is None
    assert waits() == [0, 1]


def test_calls_of_one_execute_may_end_in_either_way(
    client: Client, session_with_events: ShmSession, stream: int
) -> None:
    requests = [client.request(0, {"Y": DEVICE}), client.request(1, {"Y": HOST}), client.request(2, {"Y": DEVICE})]
    session_with_events.serve(requests, double_into(stream, "Y"))
    assert [len(client.events(slot)) for slot in range(3)] == [2, 0, 2]


def test_an_event_that_cannot_be_recorded_fails_the_call(
    client: Client, session_with_events: ShmSession, stream: int
) -> None:
    def infer(call: Call) -> None:
        double_into(stream, "Y")(call)
        DRIVER.fail_next("cuEventRecord", ILLEGAL, process=MODEL)

    (response,) = session_with_events.serve([client.request(0, {"Y": DEVICE})], infer)
    assert error_code(response) == "UNAVAILABLE"
    assert not client.host.has_results(0)
    assert client.is_over(0)


@pytest.mark.parametrize(
    "let_go",
    [lambda session: session._open_context().resolver.sweep(), lambda session: session.close()],
    ids=["looks after its mappings", "is closed"],
)
def test_memory_stays_mapped_while_the_gpu_writes_to_it_although_the_session(
    client: Client, session_with_events: ShmSession, stream: int, let_go: Callable[[ShmSession], None]
) -> None:
    with held_back(stream) as finish:
        session_with_events.serve([client.request(0, {"Y": DEVICE})], double_into(stream, "Y"))
        client.region.segment.unlink()
        letting_go = threading.Thread(target=let_go, args=(session_with_events,))
        letting_go.start()
        letting_go.join(0.3)  # it may wait for the GPU, or come back to it later
        assert has_users(client.region.segment.fileno()), "the client would free what the GPU writes to"
        finish.set()
        letting_go.join(PATIENCE_S)
    assert DRIVER.violations() == []


def test_events_are_asked_for_by_a_parameter() -> None:
    def config_with(value: str) -> Config:
        return Config.from_config({"parameters": {"SHM_GPU_EVENTS": {"string_value": value}}})

    assert [config_with(value).gpu_events for value in ("true", "false")] == [True, False]
    with pytest.raises(ModelError, match="parameter SHM_GPU_EVENTS is 'yes'; expected true or false"):
        config_with("yes")
