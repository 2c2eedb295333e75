"""A server whose model works on GPUs: in a virtual process of the fake driver, by the protocol, late as it likes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shm_backend_utils import dtypes
from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.locks import SharedLease
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import layout, results
from shm_backend_utils.protocol.address import SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.results import NO_RESULTS, OutputPlace
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.unit.fake_server import Arrays, FakeServer, Order

__all__ = ["PROCESS", "Claimed", "GpuServer"]

PROCESS = 1


@dataclass
class Claimed:
    """What a request said of memory on GPUs.

    Attributes
    ----------
    claim : CudaRegionClaim
    address : int
        In the model's process.
    lease : SharedLease
    event : int
        The client's, opened; 0 if there is none.
    """

    claim: CudaRegionClaim
    address: int
    lease: SharedLease
    event: int


@dataclass
class _Seen:
    claims: tuple[CudaRegionClaim, ...] = ()
    inputs: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class GpuServer(FakeServer):
    """Doubles each ``IN`` on a GPU into the room of its ``OUT``.

    Attributes
    ----------
    seen : _Seen
        What the last request had: its claims, and its inputs as they were when the model's kernel began.
    answers_early : bool
        Whether it records the client's events and answers before its GPU has begun, where the protocol allows that.
    work_s : float
        How long its kernels take.
    keeps_loans : bool
        Whether it keeps an array over memory that is lent for one request.
    dies : bool
        Whether the model dies in the middle of a request, and the server says so.
    events : sequence of int or None
        What its results name, in place of the truth.
    """

    def __init__(self, driver: FakeDriver, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.driver = driver
        self.runtime = driver.runtime(PROCESS)
        self.own_stream = self.runtime.create_stream(0)
        self.seen = _Seen()
        self.answers_early = False
        self.work_s = 0.0
        self.keeps_loans = False
        self.lives = 1
        self.dies = False
        self.events: tuple[int, ...] | None = None
        self.kept: list[Claimed] = []
        self._fenced: dict[bytes, Claimed] = {}

    @contextlib.contextmanager
    def at_work_on_the_next(self) -> Iterator[None]:
        """Be at work on the next request for the time of the block, and not answer it."""
        leases = []

        def begin(order: Order) -> None:
            address = parse_address(order.parameters[SLOT_PARAMETER])
            leases.append(self._region(address.key, address.token).lease(address.slot))
            assert leases[-1].take()
            raise DeadlineExceededError("no answer")

        self.before = begin
        try:
            yield
        finally:
            self.before = lambda order: None
            for lease in leases:
                lease.give_back()

    def let_go(self) -> None:
        """Unmap what was kept of loans."""
        while self.kept:
            self._unmap(self.kept.pop())

    def die(self) -> None:
        """Let the model's process end: its mappings and locks go, and its kernels write nothing any more."""
        self.lives += 1
        for each in (*self.kept, *self._fenced.values()):
            self._unmap(each)
        self.kept, self._fenced = [], {}

    def close(self) -> None:
        self.runtime.synchronize_device(0)
        self.let_go()
        for each in self._fenced.values():
            self._unmap(each)
        self._fenced = {}
        self.runtime.destroy_stream(self.own_stream, 0)
        super().close()

    def sweep(self) -> None:
        """Let go of memory whose region is gone, as a model does from time to time."""
        for region in self._mapped.values():
            if region.segment.is_unlinked:
                break
        else:
            return
        for handle in list(self._fenced):
            self._unmap(self._fenced.pop(handle))

    def _in_slot(self, order: Order) -> Arrays:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        region = self._region(address.key, address.token)
        lease = region.lease(address.slot)
        deadline = time.monotonic() + 10
        while not lease.take():
            assert time.monotonic() < deadline, "somebody else executes in this slot"
            time.sleep(0.0001)
        try:
            region, record, generation, contents = self._begin(order)
            encoded = NO_RESULTS
            is_alive = True
            try:
                with self._claimed(region, address.slot, contents) as claimed:
                    places = self._run(region, contents, claimed, order)
                    if self.dies:
                        is_alive = False
                        self.die()
                        raise InferenceError("Stub process 'model_0' is not healthy.", "StatusCode.INTERNAL")
                    events = self._finish(claimed, places) if self.events is None else self.events
                    encoded = results.encode(places, events)
            finally:
                if is_alive:
                    record.complete(generation, encoded)
            return {}
        finally:
            lease.give_back()

    @contextlib.contextmanager
    def _claimed(self, region: ManagedRegion, slot: int, contents: Table) -> Iterator[list[Claimed]]:
        claims = tuple([claim for claim in contents.regions if isinstance(claim, CudaRegionClaim)])
        self.seen = _Seen(claims)
        fd, record = region.segment.fileno(), layout.record_offset(slot, region.header.record_byte_size)
        claimed, loans = [], []
        for claim in claims:
            if claim.is_for_one_request:
                lease = locks.borrow(fd, record)
                assert lease is not None
                claimed.append(self._map(claim, lease))
                loans.append(claimed[-1])
                continue
            if claim.handle not in self._fenced:
                self._fenced[claim.handle] = self._map(claim, locks.use(fd))
            claimed.append(self._fenced[claim.handle])
        try:
            yield claimed
        finally:
            if loans and not self.dies:
                self.runtime.synchronize_device(0)
            for each in loans:
                if self.keeps_loans:
                    self.kept.append(each)
                else:
                    self._unmap(each)

    def _map(self, claim: CudaRegionClaim, lease: SharedLease) -> Claimed:
        address = self.runtime.open(claim.handle, 0)
        event = self.runtime.open_event(claim.event, 0) if claim.event else 0
        return Claimed(claim, address, lease, event)

    def _unmap(self, each: Claimed) -> None:
        if each.event:
            self.runtime.destroy_event(each.event, 0)
        self.runtime.close(each.address, 0)
        each.lease.give_back()

    def _run(self, region: ManagedRegion, contents: Table, claimed: list[Claimed], order: Order) -> list[OutputPlace]:
        memory, places = region.bytes(), []
        if self.work_s:
            seconds = self.work_s
            self._launch(lambda: time.sleep(seconds))

        def at(region: int, offset: int, byte_size: int) -> Callable[[], npt.NDArray[np.uint8]]:
            if region == 0:
                return lambda: memory[offset : offset + byte_size]
            address = claimed[region - 1].address + offset
            return lambda: self.driver.memory(address, (byte_size,), np.uint8)

        for name, span in contents.inputs.items():
            output = name.replace("IN", "OUT")
            room = contents.outputs[output]
            dtype, shape = span.dtype, span.shape
            assert room.byte_size >= span.byte_size
            source, target = at(span.region, span.offset, span.byte_size), at(room.region, room.offset, span.byte_size)

            def kernel(
                name: str = name, source: Any = source, target: Any = target, dtype: Any = dtype, life: int = self.lives
            ) -> None:
                if life != self.lives:
                    return
                values = source().view(dtype.numpy).copy()
                self.seen.inputs[name] = values
                target()[...] = (values + values).astype(dtype.numpy).view(np.uint8)

            self._launch(kernel)
            places.append(
                OutputPlace(output, dtypes.BY_NAME[dtype.name], shape, room.region, room.offset, span.byte_size, False)
            )
        return places

    def _launch(self, kernel: Callable[[], object]) -> None:
        with self.runtime.on(0):
            self.driver.launch(self.own_stream, kernel, PROCESS)

    def _finish(self, claimed: list[Claimed], places: list[OutputPlace]) -> tuple[int, ...]:
        may_be_early = all(place.region for place in places) and not any(
            each.claim.is_for_one_request for each in claimed
        )
        if not (self.answers_early and may_be_early):
            self.runtime.synchronize_stream(self.own_stream, 0)
            return ()
        with self.runtime.on(0):
            for each in claimed:
                if each.event:
                    self.runtime.record(each.event, self.own_stream)
        return tuple([number for number, each in enumerate(claimed, 1) if each.event])
