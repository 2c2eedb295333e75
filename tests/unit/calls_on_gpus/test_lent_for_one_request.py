"""Memory of a GPU that a client lends for one request: unmapped before the answer. Claims that lie are refused."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shm_backend_utils.errors import ModelError, TableError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH, CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping.resolver import collect_all
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.layout import SlotRecord
from shm_backend_utils.protocol.spans import Table
from tests.property.fuzz_tables import mutated
from tests.unit.calls_on_gpus.device_calls import DEVICE, Client, session_on
from tests.unit.emulated import delivered, message_of
from tests.unit.fake_gpu import DRIVER, MODEL, held_back, kernel, left_of, wait_until
from tests.unit.manager_cuda.conftest import NOTHING, close_lease_on
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


REQUESTS = 600
HEAD = 32
"""Bytes of a claim in front of its handles."""


def copy_input(call: Call) -> None:
    call.put("Y", call.input("X"))


def said_by(client: Client, generation: int) -> Table:
    """Return the table of the request that the client has begun."""
    header = client.region.header
    data = bytes(client.region.record(0).request)
    found, said = table.decode(data, client.host.data, header.byte_size)
    assert found == generation
    return said


def broken(rng: random.Random, client: Client, encoded: bytes) -> bytes:
    """Return a table in which a claim, its handles as a whole, its event, or a tensor is not what it was."""
    handles = [each.handle for each in client.allocations]
    begin = encoded.index(rng.choice(handles))
    way = rng.choice(("claim", "claim", "event", "handle", "tensors"))
    if way == "handle":
        other = rng.choice((*handles, client.allocations[0].event_handle, rng.randbytes(HANDLE_LENGTH)))
        return encoded[:begin] + other + encoded[begin + HANDLE_LENGTH :]
    if way == "claim":
        return mutated(rng, encoded, begin - HEAD, begin)
    if way == "event":
        return mutated(rng, encoded, begin + HANDLE_LENGTH, begin + 2 * HANDLE_LENGTH)
    return mutated(rng, encoded, encoded.index(handles[-1]) + 2 * HANDLE_LENGTH, len(encoded))


def cuda_regions(said: Table) -> list[CudaRegionClaim]:
    return [each for each in said.regions if isinstance(each, CudaRegionClaim)]


def is_passing(claim: Any) -> bool:
    return isinstance(claim, CudaRegionClaim) and (claim.is_for_one_request or claim.fence is None)


@pytest.mark.parametrize(
    "claimed", [{"is_for_one_request": True}, {}, {"fence": None}], ids=["lent", "fenced", "not fenced"]
)
def test_broken_claims_leave_nothing_mapped_and_the_next_request_is_served(
    client: Client, session: ShmSession, claimed: dict[str, Any]
) -> None:
    rng, codes = random.Random(1), Counter[str]()
    for number in range(REQUESTS):
        client.write(0, number)
        client.request(0, {"Y": DEVICE})
        said = said_by(client, client.host.generations[0])
        whole = Table(said.inputs, said.outputs, tuple([replace(each, **claimed) for each in cuda_regions(said)]))
        sent = delivered(client.host.begin(broken(rng, client, table.encode(whole)), 0), ["Y"])
        try:
            claims = said_by(client, client.host.generations[0]).regions
        except (TableError, AssertionError):
            claims = ()
        (response,) = session.serve([sent], copy_input)
        codes[message_of(response).split(" ")[0]] += 1
        assert client.is_over(0) or response.error() is not None
        resolver = session._open_context().resolver
        if not (claims and all(map(is_passing, claims))):
            resolver.registry.unregister_all()  # what is fenced stays mapped, and is none of what is looked for here
            collect_all(resolver._cuda)
        assert left_of(MODEL) == NOTHING
        assert client.host.is_free(0), "what was lent is still borrowed"
        if number % 50 == 0:
            (response,) = session.serve([delivered(client.host.begin(whole, 0), ["Y"])], copy_input)
            assert response.error() is None
            assert client.output(0, "Y") == [number] * 4
    assert set(codes) <= {"", "shm:table:", "shm:refused:", "shm:tensor:", "shm:missing:", "shm:stale:", "shm:machine:"}
    assert min(codes[""], codes["shm:table:"], codes["shm:refused:"]) > REQUESTS // 50, codes
