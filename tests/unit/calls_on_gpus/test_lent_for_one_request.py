"""Memory of a GPU that a client lends for one request: unmapped before the answer, or when model.py lets go of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.errors import ModelError
from shm_backend_utils.memory.cuda.allocations import CudaAllocation
from shm_backend_utils.memory.cuda.errors import CudaError
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.protocol.layout import SlotRecord
from tests.unit.calls_on_gpus.device_calls import DEVICE, Client, session_on
from tests.unit.emulated import message_of
from tests.unit.fake_gpu import DRIVER, MODEL, held_back, kernel, left_of, wait_until
from tests.unit.manager_cuda.conftest import close_lease_on
from tests.unit.watched import Watched

OPEN, CLOSE = "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"


def request(client: Client, slot: int = 0, outputs: Any = None) -> Any:
    return client.request(slot, {} if outputs is None else outputs, is_for_one_request=True)


def counts() -> tuple[int, int]:
    """Return how often the model has mapped and unmapped memory."""
    return DRIVER.count(OPEN, MODEL), DRIVER.count(CLOSE, MODEL)


def x_of(call: Call) -> Any:
    return call.input("X").array


def read(call: Call) -> None:
    assert call.to_host(call.input("X")).tolist() == [3] * 4


@pytest.fixture
def looked(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much there was open in the model when it wrote its results."""
    found: list[int] = []
    client.region.record(0)  # made by the client, and so not watched

    def record_of_model(*arguments: Any) -> SlotRecord:
        record: Any = SlotRecord(*arguments)
        record.results = Watched(record.results, before_write=lambda: found.append(left_of(MODEL).opened))
        return record  # type: ignore[no-any-return]

    monkeypatch.setattr("shm_backend_utils.memory.managed.SlotRecord", record_of_model)
    return found


def test_it_is_unmapped_before_the_answer(client: Client, session: ShmSession, stream: int, looked: list[int]) -> None:
    client.write(0, 3)

    def infer(call: Call) -> None:
        read(call)
        assert counts() == (2, 0)
        kernel(stream, lambda memory: memory.sum(), x_of(call))

    (response,) = session.serve([request(client)], infer)
    assert response.error() is None
    assert counts() == (2, 2)
    assert looked == [0]
    assert client.host.is_free(0)


def test_requests_side_by_side_share_one_mapping_of_an_allocation(client: Client, session: ShmSession) -> None:
    for slot in range(3):
        client.write(slot, 3)
    responses = session.serve([request(client, slot) for slot in range(3)], read)
    assert [response.error() for response in responses] == [None] * 3
    assert counts() == (2, 2)
    assert all(client.host.is_free(slot) for slot in range(3))


def test_an_array_that_model_py_keeps_keeps_it_mapped_and_borrowed(client: Client, session: ShmSession) -> None:
    client.write(0, 3)
    kept: list[Any] = []
    (response,) = session.serve([request(client)], lambda call: kept.append(x_of(call)))
    assert response.error() is None
    assert client.is_over(0)
    assert counts() == (2, 1)  # that of the other GPU is gone
    assert not client.host.is_free(0), "the client would give its tensor back"
    assert kept[0].to_host().tolist() == [3] * 4
    kept.clear()
    wait_until(lambda: not session._open_context().resolver._cuda.collect())
    assert counts() == (2, 2)
    assert client.host.is_free(0)


def test_the_sweeper_unmaps_what_was_kept_when_the_gpu_has_finished_with_it(
    client: Client, session: ShmSession, stream: int
) -> None:
    kept: list[Any] = []
    session.serve([request(client)], lambda call: kept.append(x_of(call)))
    with held_back(stream) as finish:
        kernel(stream, lambda memory: memory.sum(), kept[0])
        kept.clear()
        session._open_context().resolver.sweep()
        assert not client.host.is_free(0)
        finish.set()
        wait_until(lambda: not session._open_context().resolver._cuda.collect())
    assert client.host.is_free(0)


def test_an_unmap_that_fails_keeps_the_lease_for_ever(cuda: CudaRuntime, client: Client, session: ShmSession) -> None:
    DRIVER.fail_next(CLOSE, "CUDA_ERROR_UNKNOWN", process=MODEL)
    (response,) = session.serve([request(client)], lambda call: None)
    assert response.error() is None
    assert client.is_over(0)
    session._open_context().resolver.sweep()
    assert not client.host.is_free(0)
    for allocation in client.allocations:  # the test undoes it: an address is closed as often as it was opened
        address = cuda.open(allocation.handle, allocation.device)
        cuda.close(address, allocation.device)
        with contextlib.suppress(CudaError):
            cuda.close(address, allocation.device)
    session.close()
    close_lease_on(client.region)


def test_a_request_that_fails_lets_go_of_it_when_its_error_is_gone(client: Client, session: ShmSession) -> None:
    def infer(call: Call) -> None:
        x_of(call)
        raise ModelError("no")

    (response,) = session.serve([request(client)], infer)
    assert message_of(response) == "shm:model: no"
    wait_until(lambda: not session._open_context().resolver._cuda.collect())
    assert client.host.is_free(0)
    assert counts()[0] == counts()[1]


def read_in_vain(call: Call) -> None:
    x = x_of(call)
    raise ModelError(f"no use for {x.shape}")


def fail(call: Call) -> None:
    read_in_vain(call)


def fail_by_another_error(call: Call) -> None:
    try:
        read_in_vain(call)
    except ModelError as error:
        cause = error
    raise ModelError("no") from cause


def fail_in_a_circle(call: Call) -> None:
    try:
        read_in_vain(call)
    except ModelError as error:
        cause = error
    cause.__cause__ = ModelError("no")
    raise cause.__cause__ from cause


@pytest.mark.parametrize("infer", [fail, fail_by_another_error, fail_in_a_circle])
def test_an_error_keeps_no_mapping_until_the_answer(
    client: Client, session: ShmSession, looked: list[int], infer: Callable[[Call], None]
) -> None:
    session.serve([request(client)], infer)
    assert looked == [0]


@pytest.mark.parametrize("is_lent", [True, False])
def test_an_error_keeps_the_locals_that_it_may(client: Client, session: ShmSession, is_lent: bool) -> None:
    with (
        pytest.raises(ModelError) as caught,
        session.open(client.request(0, {}, is_for_one_request=is_lent)) as call,
    ):
        read_in_vain(call)
    assert ("x" in caught.traceback[-1].frame.f_locals) is not is_lent


def test_the_model_waits_for_it_also_where_clients_wait_for_events(
    cuda: CudaRuntime, client: Client, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_on(cuda, monkeypatch, gpu_events=True)

    def infer(call: Call) -> None:
        call.ready_on(stream)
        kernel(stream, lambda y: y.fill(7), call.output("Y", (4,), np.float32).array)

    session.serve([request(client, 0, {"Y": DEVICE})], infer)
    assert client.events(0) == ()
    assert client.output(0, "Y") == [7] * 4
    assert client.host.is_free(0)
    session.close()


def test_a_client_that_takes_the_slot_back_finds_it_unmapped(client: Client, session: ShmSession) -> None:
    sent = request(client)
    client.region.record(0).begin(client.host.generations[0] + 1, b"")
    client.host.generations[0] += 1
    (response,) = session.serve([sent], read)
    assert "shm:stale" in message_of(response)
    assert counts() == (0, 0)
    assert client.host.is_free(0)


@pytest.mark.parametrize("fenced", [True, False], ids=["lent", "not fenced"])
@pytest.mark.parametrize("reason", ["table", "handle"])
def test_a_request_that_is_refused_leaves_nothing_mapped(
    client: Client, session: ShmSession, reason: str, fenced: bool
) -> None:
    garbage = SimpleNamespace(**{**vars(client.allocations[1]), "handle": bytes(64)})
    allocations = list(client.allocations)
    if reason == "handle":
        client.allocations[1] = cast("CudaAllocation", garbage)
    outputs = {"NONE": DEVICE} if reason == "table" else {}
    sent = client.request(0, outputs, fenced=fenced, is_for_one_request=fenced)
    client.allocations[:] = allocations
    (response,) = session.serve([sent], read)
    assert response.error() is not None
    assert left_of(MODEL).opened == 0
    assert client.host.is_free(0)


def test_what_no_slot_fences_is_unmapped_before_the_answer_also_while_another_thread_unmaps(
    cuda: CudaRuntime, client: Client, session: ShmSession
) -> None:
    cuda.retired._lock.acquire()  # as the sweeper does
    late = threading.Timer(0.1, cuda.retired._lock.release)
    late.start()
    (response,) = session.serve([client.request(0, {}, fenced=False)], lambda call: x_of(call) and None)
    assert response.error() is None
    assert counts() == (2, 2)
    late.join()


# Many


@pytest.fixture
def allocations(client_cuda: CudaRuntime) -> Iterator[list[CudaAllocation]]:
    made = [CudaAllocation(client_cuda, 64, DEVICE) for _ in range(64)]
    yield made
    for each in made:
        each.free()


@pytest.mark.parametrize("every", [3, 1], ids=["some", "all"])
def test_a_thousand_requests_over_64_allocations_leave_nothing(
    client: Client, session: ShmSession, allocations: list[CudaAllocation], every: int
) -> None:
    opened, former = set(), client.allocations[0]
    for number in range(1000):
        client.allocations[0] = allocations[number % 64]
        sent = client.request(0, {}, is_for_one_request=number % every == 0)
        client.allocations[0] = former
        (response,) = session.serve([sent], lambda call: x_of(call) and None)
        assert response.error() is None
        opened.add(left_of(MODEL).opened)
    assert client.host.is_free(0)
    assert max(opened) <= 65
    assert left_of(MODEL).allocations == 0
