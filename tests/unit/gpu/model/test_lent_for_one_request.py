"""Memory of a GPU that a client lends for one request: unmapped before the answer. Claims that lie are refused."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import ModelError, TableError
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.runtime import HANDLE_LENGTH
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import Call
from shm_backend_utils.model.mapping.resolver import collect_all
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.layout import SlotRecord
from shm_backend_utils.protocol.spans import Table
from tests.property.random_tables import mutated
from tests.unit.emulated import delivered, error_of, message_of
from tests.unit.gpu.fakes import DRIVER, MODEL, NOTHING, PATIENCE_S, held_back, kernel, left_of, wait_until
from tests.unit.gpu.model.conftest import DEVICE, Calls, Client
from tests.unit.table_client import Watched

OPEN, CLOSE = "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"
LENT = {"is_for_one_request": True}


def counts() -> tuple[int, int]:
    return DRIVER.count(OPEN, MODEL), DRIVER.count(CLOSE, MODEL)


def x_of(call: Call) -> Any:
    return call.input("X").array


def read(call: Call) -> None:
    assert call.to_host(call.input("X")).tolist() == [3] * 4


@pytest.fixture
def looked(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    client.region.record(0)  # made by the client, and so not watched

    def record_of_model(*arguments: Any) -> SlotRecord:
        record: Any = SlotRecord(*arguments)
        record.results = Watched(record.results, before_write=lambda: found.append(left_of(MODEL).opened))
        return record  # type: ignore[no-any-return]

    monkeypatch.setattr("shm_backend_utils.memory.managed.SlotRecord", record_of_model)
    return found


def test_it_is_unmapped_before_the_answer(calls: Calls, looked: list[int]) -> None:
    calls.client.write(0, 3)

    def infer(call: Call) -> None:
        read(call)
        assert counts() == (2, 0)
        kernel(calls.stream, lambda memory: memory.sum(), x_of(call))

    calls.serve(infer, **LENT)
    assert counts() == (2, 2)
    assert looked == [0]
    assert calls.client.host.is_free(0)


def test_requests_side_by_side_share_one_mapping_of_an_allocation(calls: Calls) -> None:
    for slot in range(3):
        calls.client.write(slot, 3)
    responses = calls.session.serve([calls.client.request(slot, {}, **LENT) for slot in range(3)], read)
    assert [response.error() for response in responses] == [None] * 3
    assert counts() == (2, 2)
    assert all(calls.client.host.is_free(slot) for slot in range(3))


def test_an_array_that_model_py_keeps_keeps_it_mapped_and_borrowed(calls: Calls) -> None:
    client, kept = calls.client, list[Any]()
    client.write(0, 3)
    calls.serve(lambda call: kept.append(x_of(call)), **LENT)
    assert client.is_over()
    assert counts() == (2, 1)  # that of the other GPU is gone
    assert not client.host.is_free(0), "the client would give its tensor back"
    assert kept[0].to_host().tolist() == [3] * 4
    with held_back(calls.stream) as finish:
        kernel(calls.stream, lambda memory: memory.sum(), kept[0])
        kept.clear()
        sweeping = threading.Thread(target=calls.session._open_context().resolver.sweep)
        sweeping.start()
        sweeping.join(0.05)
        assert not client.host.is_free(0), "the GPU has not finished with it"
        finish.set()
        sweeping.join(PATIENCE_S)
    wait_until(lambda: client.host.is_free(0))
    assert counts() == (2, 2)


def test_an_unmap_that_fails_keeps_the_lease_for_ever(calls: Calls) -> None:
    client, cuda = calls.client, calls.cuda
    DRIVER.fail_next(CLOSE, "CUDA_ERROR_UNKNOWN", process=MODEL)
    calls.serve(lambda call: None, **LENT)
    assert client.is_over()
    calls.session._open_context().resolver.sweep()
    assert not client.host.is_free(0)
    for allocation in client.allocations:  # the test undoes it: an address is closed as often as it was opened
        address = cuda.open(allocation.handle, allocation.device)
        cuda.close(address, allocation.device)
        with contextlib.suppress(CudaError):
            cuda.close(address, allocation.device)
    calls.session.close()
    close_leases_on(client.region)


def close_leases_on(region: ManagedRegion) -> None:
    """Close what the library keeps open for ever, as it cannot know better."""
    for link in Path("/proc/self/fd").iterdir():
        is_other = link.is_symlink() and int(link.name) != region.segment.fileno()
        if is_other and region.segment.key in str(link.readlink()):
            os.close(int(link.name))


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
def test_an_error_keeps_no_mapping(calls: Calls, looked: list[int], infer: Callable[[Call], None]) -> None:
    assert calls.refusal(infer, **LENT).startswith("shm:model: no")
    assert looked == [0]
    calls.collect()
    assert calls.client.host.is_free(0)
    assert counts()[0] == counts()[1]


@pytest.mark.parametrize("is_lent", [True, False])
def test_an_error_keeps_the_locals_that_it_may(calls: Calls, is_lent: bool) -> None:
    request = calls.client.request(0, {}, is_for_one_request=is_lent)
    with pytest.raises(ModelError) as caught, calls.session.open(request) as call:
        read_in_vain(call)
    assert ("x" in caught.traceback[-1].frame.f_locals) is not is_lent
    del caught


def test_what_no_slot_fences_is_unmapped_before_the_answer_also_while_another_thread_unmaps(calls: Calls) -> None:
    calls.cuda.retired._lock.acquire()  # as the sweeper does
    late = threading.Timer(0.1, calls.cuda.retired._lock.release)
    late.start()
    calls.serve(lambda call: x_of(call) and None, fenced=False)
    assert counts() == (2, 2)
    late.join()


REQUESTS = 600
HEAD = 32
"""Bytes of a claim in front of its handles."""


def copy_input(call: Call) -> None:
    call.put("Y", call.input("X"))


def said_by(client: Client, generation: int) -> Table:
    header = client.region.header
    data = bytes(client.region.record(0).request)
    found, said = table.decode(data, client.host.data, header.byte_size)
    assert found == generation
    return said


def broken(rng: random.Random, client: Client, encoded: bytes) -> bytes:
    handles = [each.handle for each in client.allocations]
    begin = encoded.index(rng.choice(handles))
    way = rng.choice(("claim", "claim", "handle", "tensors"))
    if way == "handle":
        other = rng.choice((*handles, rng.randbytes(HANDLE_LENGTH)))
        return encoded[:begin] + other + encoded[begin + HANDLE_LENGTH :]
    if way == "claim":
        return mutated(rng, encoded, begin - HEAD, begin)
    return mutated(rng, encoded, encoded.index(handles[-1]) + HANDLE_LENGTH, len(encoded))


def cuda_regions(said: Table) -> list[CudaRegionClaim]:
    return [each for each in said.regions if isinstance(each, CudaRegionClaim)]


def is_passing(claim: Any) -> bool:
    return isinstance(claim, CudaRegionClaim) and (claim.is_for_one_request or claim.fence is None)


@pytest.mark.parametrize(
    "claimed", [{"is_for_one_request": True}, {}, {"fence": None}], ids=["lent", "fenced", "not fenced"]
)
def test_broken_claims_leave_nothing_mapped(calls: Calls, claimed: dict[str, Any]) -> None:
    client, session = calls.client, calls.session
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
            resolver.registry.free_all_names()  # what is fenced stays mapped, and is none of what is looked for here
            collect_all(resolver._cuda)
        assert left_of(MODEL) == NOTHING
        assert client.host.is_free(0), "what was lent is still borrowed"
        if number % 50 == 0:
            assert error_of(session, delivered(client.host.begin(whole, 0), ["Y"]), copy_input) == ""
            assert client.output(0, "Y") == [number] * 4
    assert set(codes) <= {"", "shm:table:", "shm:refused:", "shm:tensor:", "shm:missing:", "shm:stale:", "shm:machine:"}
    assert min(codes[""], codes["shm:table:"], codes["shm:refused:"]) > REQUESTS // 50, codes
