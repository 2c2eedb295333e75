"""A server whose model works on GPUs: in a virtual process of the fake driver, by the protocol, late as it likes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client.errors import DeadlineExceededError, InferenceError
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.locks import SharedLease
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import layout, results
from shm_backend_utils.protocol.claims import CudaDescriptorClaim, CudaRegionClaim
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.protocol.layout import RESULTS
from shm_backend_utils.protocol.parameters import SLOT_PARAMETER, parse_address
from shm_backend_utils.protocol.results import NO_RESULTS, OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from tests.unit.fake_server import Arrays, FakeServer, Order
from tests.unit.gpu.fakes import DRIVER

PROCESS = 1
"""The virtual process of the model."""


class Claimed(NamedTuple):
    """What a request said of memory on GPUs, and the model has of it."""

    claim: CudaRegionClaim | CudaDescriptorClaim
    address: int
    lease: SharedLease

    @property
    def is_loan(self) -> bool:
        return isinstance(self.claim, CudaRegionClaim) and self.claim.is_for_one_request


class GpuServer(FakeServer):
    """Doubles each ``IN`` on a GPU into the room of its ``OUT``. Its attributes say what is different."""

    def __init__(self, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.runtime = DRIVER.runtime(PROCESS)
        self.own_stream = self.runtime.create_stream(0)
        self.claims: tuple[CudaRegionClaim | CudaDescriptorClaim, ...] = ()  # the last request's
        self.inputs: dict[str, npt.NDArray[Any]] = {}  # the last request's, as they were when the kernel began
        self.answers_early = False  # whether it answers before its GPU has begun, where the protocol allows that
        self.work_s = 0.0  # how long its kernels take
        self.keeps_loans = False  # whether it keeps an array over memory that is lent for one request
        self.dies = False  # whether the model dies in the middle of a request, and the server says so
        self.events: tuple[int, ...] | None = None  # what its results name, in place of the truth
        # What its GPU writes to `completed` after an early answer; None if it never does.
        self.completes: Callable[[int], int] | None = lambda generation: generation
        self._lives = 1
        self._working: list[SharedLease] = []
        self._kept: list[Claimed] = []
        self._fenced: dict[bytes | str, Claimed] = {}  # by handle, or by key
        self._fetcher = Fetcher(1.0)

    @contextlib.contextmanager
    def at_work_on_the_next(self) -> Iterator[None]:
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
        while self._kept:
            self._unmap(self._kept.pop())

    def die(self) -> None:
        self._lives += 1
        DRIVER.forgive("waits")  # whoever dies waits for nothing
        while self._working:
            self._working.pop().give_back()
        for each in (*self._kept, *self._fenced.values()):
            self._unmap(each)
        DRIVER.forgive()
        self._kept, self._fenced = [], {}

    def close(self) -> None:
        self.runtime.synchronize_device(0)
        self.die()
        self.runtime.destroy_stream(self.own_stream, 0)
        super().close()

    def sweep(self) -> None:
        for region in self._mapped.values():
            if region.segment.is_unlinked:
                break
        else:
            return
        for handle in list(self._fenced):
            self._unmap(self._fenced.pop(handle))

    def _in_slot(self, order: Order) -> Arrays:
        address = parse_address(order.parameters[SLOT_PARAMETER])
        with self._leased(address):
            region, record, generation, contents = self._begin(order)
            try:
                with self._claimed(region, address.slot, contents) as claimed:
                    places = self._run(region, contents, claimed)
                    if self.dies:
                        self.die()
                        raise InferenceError("Stub process 'model_0' is not healthy.", "StatusCode.INTERNAL")
                    if self.events is not None:
                        encoded = results.encode(places, self.events)
                    elif self._may_be_early(claimed, places):
                        encoded = results.encode(places, range(1, len(claimed) + 1))
                        record.results[RESULTS : RESULTS + len(encoded)] = encoded
                        self._complete_later(region, address.slot, generation)
                        return {}
                    else:
                        self.runtime.synchronize_stream(self.own_stream, 0)
                        encoded = results.encode(places)
            except BaseException:
                if not self.dies:
                    record.complete(generation, NO_RESULTS)
                raise
            record.complete(generation, encoded)
            return {}

    @contextlib.contextmanager
    def _claimed(self, region: ManagedRegion, slot: int, contents: Table) -> Iterator[list[Claimed]]:
        kinds = CudaRegionClaim | CudaDescriptorClaim
        claims = tuple([claim for claim in contents.regions if isinstance(claim, kinds)])
        self.claims, self.inputs = claims, {}
        fd, record = region.segment.fileno(), layout.record_offset(slot, region.header.record_byte_size)
        claimed, loans = [], []
        for claim in claims:
            if isinstance(claim, CudaRegionClaim) and claim.is_for_one_request:
                lease = locks.borrow(fd, record)
                assert lease is not None
                claimed.append(self._map(claim, lease))
                loans.append(claimed[-1])
                continue
            name = claim.handle if isinstance(claim, CudaRegionClaim) else claim.key
            if name not in self._fenced:
                self._fenced[name] = self._map(claim, locks.use(fd))
            claimed.append(self._fenced[name])
        try:
            yield claimed
        finally:
            if loans and not self.dies:
                self.runtime.synchronize_device(0)
            if self.keeps_loans:
                self._kept += loans
                loans.clear()
            for each in loans:
                self._unmap(each)

    def _map(self, claim: CudaRegionClaim | CudaDescriptorClaim, lease: SharedLease) -> Claimed:
        if isinstance(claim, CudaDescriptorClaim):
            size, key = claim.byte_size, parse_sealed_key(claim.key)
            assert key is not None
            opened = self._fetcher.take(
                key,
                claim.token,
                "memory",
                lambda _: True,
                lambda found: self.runtime.import_shareable(found.fileno(), size, 0),
            )
            return Claimed(claim, opened, lease)
        return Claimed(claim, self.runtime.open(claim.handle, 0), lease)

    def _unmap(self, each: Claimed) -> None:
        if isinstance(each.claim, CudaRegionClaim):
            self.runtime.close(each.address, 0)
        else:
            self.runtime.wait_beside_captures(0)
            self.runtime.unmap(each.address, each.claim.byte_size, 0)
        each.lease.give_back()

    def _run(self, region: ManagedRegion, contents: Table, claimed: list[Claimed]) -> list[OutputPlace]:
        memory, places = region.bytes(), []
        if self.work_s:
            self._launch(functools.partial(time.sleep, self.work_s))

        def at(span: InputSpan | OutputSpan, byte_size: int) -> Callable[[], npt.NDArray[np.uint8]]:
            if span.region == 0:
                return lambda: memory[span.offset : span.offset + byte_size]
            address = claimed[span.region - 1].address + span.offset
            return lambda: DRIVER.memory(address, (byte_size,), np.uint8)

        for name, span in contents.inputs.items():
            output = name.replace("IN", "OUT")
            room, size = contents.outputs[output], span.byte_size
            assert room.byte_size >= size
            source, target = at(span, size), at(room, size)
            self._launch(functools.partial(self._double, self._lives, name, source, target, span.dtype.numpy))
            places.append(OutputPlace(output, span.dtype, span.shape, room.region, room.offset, size, False))
        return places

    def _double(self, life: int, name: str, source: Any, target: Any, dtype: np.dtype[Any]) -> None:
        if life == self._lives:
            values = self.inputs[name] = source().view(dtype).copy()
            target()[...] = (values + values).astype(dtype).view(np.uint8)

    def _launch(self, kernel: Callable[[], object]) -> None:
        with self.runtime.on(0):
            DRIVER.launch(self.own_stream, kernel, PROCESS)

    def _may_be_early(self, claimed: list[Claimed], places: list[OutputPlace]) -> bool:
        return (
            self.answers_early and all(place.region for place in places) and all(each.claim.waits for each in claimed)
        )

    def _complete_later(self, region: ManagedRegion, slot: int, generation: int) -> None:
        """Let the own stream complete a request, unless the model is dead by then."""
        record, life = region.record(slot), self._lives
        lease = locks.work(region.segment.fileno(), region.record_offset(slot))
        self._working.append(lease)

        def complete() -> None:
            if life == self._lives and self.completes is not None:
                record.model_words[layout.COMPLETED] = self.completes(generation)
                lease.give_back()

        self._launch(complete)
