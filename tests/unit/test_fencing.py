"""How a model claims a generation of a slot for execution, and from whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shm_backend_utils.errors import ReplayedRequestError, StaleRequestError
from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import direct
from shm_backend_utils.model.direct import DirectPlan, DirectTensors
from shm_backend_utils.model.manager import SharedMemoryManager
from shm_backend_utils.model.regions import Resolver
from shm_backend_utils.model.settings import Settings
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.descriptor import Descriptor, SystemRegionClaim

GENERATION = 7
MapIt = Callable[[], DirectPlan]


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    """The client's side of a region whose slot is in its seventh generation."""
    region = ManagedRegion.create(4096)
    region.record(0).generation = GENERATION
    yield region
    region.segment.unlink()
    region.close()


@pytest.fixture
def map_it(region: ManagedRegion) -> Iterator[MapIt]:
    """Maps the region on the model's side. A fixture of the plan itself would hold the mapping for too long."""
    manager = SharedMemoryManager()
    claim = SystemRegionClaim(region.segment.key, region.header.byte_size, region.header.token.hex(), 0)

    def map_it() -> DirectPlan:
        resolved = Resolver(Settings(), manager, CudaAccess()).resolve(claim, "region", [])
        return DirectPlan(Descriptor("m", (claim,), {}, {}), ModelSpec.from_config({"name": "m"}), [resolved])

    yield map_it
    manager.unregister_all()


def test_the_lease_is_held_until_the_end(region: ManagedRegion, map_it: MapIt) -> None:
    plan = map_it()
    tensors = DirectTensors(plan, GENERATION)
    assert not region.lease(0).take()
    tensors.complete(b"")
    assert region.lease(0).take()


def test_the_slots_record_tells_what_was_started_and_completed(region: ManagedRegion, map_it: MapIt) -> None:
    plan = map_it()
    tensors = DirectTensors(plan, GENERATION)
    assert (region.record(0).started, region.record(0).completed) == (GENERATION, 0)
    tensors.fail()
    assert (region.record(0).completed, region.record(0).results()) == (GENERATION, b"")


@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1])
def test_a_request_of_another_generation_is_stale(region: ManagedRegion, map_it: MapIt, generation: int) -> None:
    plan = map_it()
    with pytest.raises(StaleRequestError, match="given this request up"):
        DirectTensors(plan, generation)
    assert region.record(0).started == 0
    assert region.lease(0).take()


def test_a_generation_is_executed_once(map_it: MapIt) -> None:
    plan = map_it()
    DirectTensors(plan, GENERATION).fail()
    with pytest.raises(ReplayedRequestError):
        DirectTensors(plan, GENERATION)


def test_a_generation_that_is_being_executed_is_refused_at_once(map_it: MapIt) -> None:
    plan = map_it()
    tensors = DirectTensors(plan, GENERATION)
    with pytest.raises(ReplayedRequestError):
        DirectTensors(plan, GENERATION)
    tensors.fail()


def test_a_lease_that_a_stale_request_has_for_a_moment_is_waited_for(region: ManagedRegion, map_it: MapIt) -> None:
    plan = map_it()
    of_the_stale = region.lease(0)
    assert of_the_stale.take()
    moment = threading.Timer(0.05, of_the_stale.give_back)
    moment.start()
    DirectTensors(plan, GENERATION).fail()
    moment.join()
    assert region.record(0).completed == GENERATION


def test_who_waits_notices_that_the_client_has_given_up(region: ManagedRegion, map_it: MapIt) -> None:
    plan = map_it()
    lease = region.lease(0)
    assert lease.take()
    region.record(0).generation = GENERATION + 1
    with pytest.raises(StaleRequestError, match="given this request up"):
        DirectTensors(plan, GENERATION)
    lease.give_back()


def test_waiting_ends(region: ManagedRegion, map_it: MapIt, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = map_it()
    monkeypatch.setattr(direct, "PATIENCE_S", 0.05)
    lease = region.lease(0)
    assert lease.take()
    begin = time.monotonic()
    with pytest.raises(StaleRequestError, match="the slot is in use"):
        DirectTensors(plan, GENERATION)
    assert time.monotonic() - begin >= 0.05
    lease.give_back()
