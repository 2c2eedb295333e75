"""A pool, slots, leases and results, with models that come late, die and lend; one step at a time."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shm_backend_utils.errors import ShmError
from shm_backend_utils.memory.pool import pool as pool_module
from shm_backend_utils.memory.pool.inventory import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.memory.pool.slot import FREE, SPOILED
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.testing.faults.system_calls import CALLS, INTERRUPT, Failing, Fault
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.property.slot_machine.parties import Borrowed, ClientCall, Model, Request, Work

SHM = Path("/dev/shm")
BUDGET = 16 * PAGE_SIZE
MODELS = 2

sizes = st.integers(512, 6 * PAGE_SIZE)
choices = st.integers(0, 1_000)
ERRORS = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.EINTR, errno.EACCES, errno.ENOLCK, INTERRUPT)
BUSY = ("fcntl", errno.EACCES)  # no failure: somebody has the lock
# A name that cannot be removed stays for the reaper, until this process has ended: the machine would count it as lost.
STAYS = [("unlink", error) for error in ERRORS if error != INTERRUPT]
faults = st.builds(Fault, st.sampled_from(sorted(CALLS)), st.integers(0, 4), st.sampled_from(ERRORS)).filter(
    lambda fault: (fault.call, fault.error) not in (BUSY, *STAYS)
)
sometimes = st.one_of(st.none(), st.none(), st.none(), faults)


class NoThread:
    """In place of the pool's housekeeper, whose rounds are steps of the machine."""

    def __init__(self, work: Callable[[], float]) -> None:
        self.work = work

    def hurry(self) -> None: ...
    def stop(self, patience_s: float | None) -> None: ...


class SlotMachine(RuleBasedStateMachine):
    """What a client and two models do in shared memory, in any order, where any system call may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = ShmLeakProbe(pool_prefix=None)
        self.there_before = set(self.files())
        self.patch = pytest.MonkeyPatch()
        self.keepers: list[NoThread] = []
        self.patch.setattr(pool_module, "Repeater", self.make_keeper)
        self.unraisable: list[str] = []
        self.patch.setattr(sys, "unraisablehook", self.note_unraisable)
        self.pool = SlotPool(PoolOptions(max_bytes=BUDGET, idle_s=0))
        self.models = [Model() for _ in range(MODELS)]
        self.calls: list[ClientCall] = []
        self.requests: list[Request] = []
        self.works: list[Work] = []
        self.borrowed: list[Borrowed] = []
        self.waiters: list[Any] = []
        self.executed: set[tuple[str, int]] = set()
        self.generations: dict[str, int] = {}
        self.value = 0
        self.was_interrupted = False
        self.has_forked = False

    @initialize(is_closed_first=st.booleans())
    def begin(self, is_closed_first: bool) -> None:
        self.is_closed_first = is_closed_first

    def teardown(self) -> None:
        try:
            if self.is_closed_first:
                self.pool.close()
            self.let_all_go()
            self.check_that_all_is_idle()
        finally:
            self.let_all_go()
            self.pool.close()
            self.patch.undo()
        if self.probe.growth():
            gc.collect()  # what only waits for the collector is no leak
        assert not self.probe.growth()

    def let_all_go(self) -> None:
        self.works.clear()
        for borrowed in self.borrowed:
            borrowed.lease.give_back()
        self.borrowed.clear()
        for model in self.models:
            model.die()
        for call in self.calls:
            call.check()
        self.calls.clear()
        self.requests.clear()

    def check_that_all_is_idle(self) -> None:
        if self.is_closed_first or self.was_interrupted:  # an interrupt may cost a region until the client is closed
            return
        while self.waiters:
            self.pool.withdraw(self.waiters.pop())
        status = self.pool.status
        assert (status.held, status.quarantined) == (0, 0)
        self.pool.drop_idle()
        assert self.pool.status.byte_size == 0

    # The client

    @rule(size=sizes, fault=sometimes)
    def take(self, size: int, fault: Fault | None) -> None:
        need = Need(size)
        with self.failing(fault):
            taken = self.pool.take_idle(need, "machine")
            if taken is not None:
                self.hold(*taken)
                return
            waiter = self.pool.request(need, "machine")
            self.waiters.append(waiter)
            if waiter.granted.done():
                self.waiters.remove(waiter)
                self.hold(*self.pool.take_granted(waiter))

    @precondition(lambda self: self.waiters)
    @rule(which=choices, gives_up=st.booleans(), fault=sometimes)
    def wait(self, which: int, gives_up: bool, fault: Fault | None) -> None:
        waiter = self.waiters[which % len(self.waiters)]
        with self.failing(fault):
            if waiter.granted.done() and not gives_up:
                self.waiters.remove(waiter)
                self.hold(*self.pool.take_granted(waiter))
            elif gives_up:
                self.pool.withdraw(waiter)
                self.waiters.remove(waiter)

    @precondition(lambda self: self.sendable())
    @rule(which=choices)
    def send(self, which: int) -> None:
        call = self.sendable()[which % len(self.sendable())]
        self.requests.append(call.send())

    @precondition(lambda self: self.sendable())
    @rule(which=choices, model=st.integers(0, MODELS - 1))
    def call(self, which: int, model: int) -> None:
        call = self.sendable()[which % len(self.sendable())]
        request = call.send()
        work = self.models[model].begin(request)
        assert isinstance(work, Work)
        self.check_begun(request)
        work.complete()
        work.end()
        call.receive()

    @precondition(lambda self: self.answered())
    @rule(which=choices)
    def receive(self, which: int) -> None:
        self.answered()[which % len(self.answered())].receive()

    @precondition(lambda self: self.calls)
    @rule(which=choices, cancels=st.booleans(), keeps_arrays=st.booleans(), fault=sometimes)
    def give_up(self, which: int, cancels: bool, keeps_arrays: bool, fault: Fault | None) -> None:
        """The client's time is over; or it has what it wants, and lets go of all."""
        call = self.calls[which % len(self.calls)]
        if not call.is_over:
            if cancels:
                call.give_up()
            call.is_over = True
        if not keeps_arrays:
            with self.failing(fault):
                self.let_go(call)

    @precondition(lambda self: any(len(call.arrays) > 1 for call in self.calls))
    @rule(which=choices, first=st.booleans())
    def drop_one_array(self, which: int, first: bool) -> None:
        calls = [call for call in self.calls if len(call.arrays) > 1]
        del calls[which % len(calls)].arrays[0 if first else -1]

    @precondition(lambda self: self.calls and not any(call.state == SPOILED for call in self.calls))
    @rule(which=choices, event=st.sampled_from(["refusal", "unfenced", "lost"]))
    def spoil(self, which: int, event: Any) -> None:
        self.calls[which % len(self.calls)].spoil(event)

    @precondition(lambda self: not self.has_forked)
    @rule()
    def fork(self) -> None:
        """A child can use nothing of its parent's, and takes nothing away: the steps that follow show it."""
        self.has_forked = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that the parent has threads: its tests' own
            child = os.fork()
        if not child:
            slots = [call.slot for call in self.calls]
            os._exit(self.pool.take_idle(Need(512), "child") is not None or any(slot.fence() for slot in slots))
        assert os.waitpid(child, 0)[1] == 0

    @rule(fault=sometimes)
    def keep_house(self, fault: Fault | None) -> None:
        with self.failing(fault):
            for keeper in self.keepers:
                keeper.work()

    # The models

    @precondition(lambda self: self.requests)
    @rule(which=choices, model=st.integers(0, MODELS - 1), is_replayed=st.booleans(), fault=sometimes)
    def execute(self, which: int, model: int, is_replayed: bool, fault: Fault | None) -> None:
        request = self.requests[which % len(self.requests)]
        if not is_replayed:
            self.requests.remove(request)
        with self.failing(fault):
            work = self.models[model].begin(request)
            if isinstance(work, Work):
                self.works.append(work)
                self.check_begun(request)
            elif request.call.slot.state == FREE and request.call.is_held:
                assert work != "RegionGoneError"

    @precondition(lambda self: self.works)
    @rule(which=choices)
    def write(self, which: int) -> None:
        work = self.works[which % len(self.works)]
        self.value = self.value % 250 + 1
        work.write(self.value)
        work.request.call.written(self.value)

    @precondition(lambda self: self.works)
    @rule(which=choices, completes=st.booleans())
    def end_work(self, which: int, completes: bool) -> None:
        work = self.works.pop(which % len(self.works))
        if completes and not any(each.request is work.request for each in self.borrowed):
            work.complete()
        work.end()

    @precondition(lambda self: self.works)
    @rule(which=choices, fault=sometimes)
    def lend(self, which: int, fault: Fault | None) -> None:
        work = self.works[which % len(self.works)]
        other = self.models[1 - self.models.index(work.model)]
        with self.failing(fault):
            borrowed = other.borrow(work.request)
            if borrowed is not None:
                self.borrowed.append(borrowed)

    @precondition(lambda self: self.borrowed)
    @rule(which=choices, ends=st.booleans())
    def borrower_writes(self, which: int, ends: bool) -> None:
        borrowed = self.borrowed[which % len(self.borrowed)]
        self.value = self.value % 250 + 1
        borrowed.write(self.value)
        borrowed.request.call.written(self.value)
        if ends:
            self.borrowed.remove(borrowed)
            borrowed.lease.give_back()

    @precondition(lambda self: any(model.slots for model in self.models))
    @rule(which=st.integers(0, MODELS - 1))
    def die(self, which: int) -> None:
        """A model's process ends; what it has borrowed is kept by the borrower's own description until it ends, too."""
        model = self.models[which]
        self.works = [work for work in self.works if work.model is not model]
        model.die()

    # What must hold after each step

    @invariant()
    def nobody_has_the_others_memory(self) -> None:
        keys = [call.key for call in self.calls if call.is_held]
        assert len(keys) == len(set(keys))
        for call in self.calls:
            call.check()

    @invariant()
    def slots_are_in_the_states_that_the_table_says(self) -> None:
        assert [call.slot.state for call in self.calls] == [call.state for call in self.calls]

    @invariant()
    def generations_only_rise(self) -> None:
        for key, slot in [(key, slot) for model in self.models for key, slot in model.slots.items()]:
            self.note_generation(key, slot.record.generation)

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.pool.status.byte_size <= BUDGET
        byte_size = 0
        for file in set(self.files()) - self.there_before:
            with contextlib.suppress(FileNotFoundError):  # the pool's own thread removes what an interrupt has lost
                byte_size += file.stat().st_size
        assert byte_size <= BUDGET

    @invariant()
    def nothing_is_raised_in_finalizers(self) -> None:
        assert not self.unraisable, "\n".join(self.unraisable)

    # Below

    def note_unraisable(self, found: Any) -> None:
        self.unraisable.append(
            "".join(traceback.format_exception(found.exc_value))
        )  # not the frames, with their memory

    def make_keeper(self, work: Callable[[], float], *_: Any) -> NoThread:
        self.keepers.append(NoThread(work))
        return self.keepers[-1]

    def hold(self, region: Any, memory: Any) -> None:
        assert region.key not in {call.key for call in self.calls}, "handed out twice"
        assert region.key not in {work.request.key for work in self.works}, "a model is at work there"
        assert region.key not in {each.request.key for each in self.borrowed}, "a model has borrowed it"
        self.value = self.value % 250 + 1
        self.calls.append(ClientCall(region, memory, self.value))
        self.note_generation(region.key, region.slots[0].generation)

    def let_go(self, call: ClientCall) -> None:
        self.calls.remove(call)
        call.arrays.clear()

    def check_begun(self, request: Request) -> None:
        assert (request.key, request.generation) not in self.executed, "executed twice"
        self.executed.add((request.key, request.generation))
        assert request.call.is_held or request.call.slot.state != FREE, "a late writer got in"
        others = [call for call in self.calls if call.key == request.key and call is not request.call]
        assert not others, "a late writer in another call's memory"

    def files(self) -> Iterator[Path]:
        return SHM.glob(f"shmbu-{os.getpid()}-*")

    def note_generation(self, key: str, generation: int) -> None:
        assert generation >= self.generations.get(key, 0)
        self.generations[key] = generation

    def sendable(self) -> list[ClientCall]:
        return [call for call in self.calls if not call.is_sent and not call.is_over]

    def answered(self) -> list[ClientCall]:
        return [call for call in self.calls if call.is_sent and not call.is_over and call.slot.is_completed]

    @contextlib.contextmanager
    def failing(self, fault: Fault | None) -> Iterator[None]:
        """Do a step in which a system call may fail; then the step may raise that, or what the library makes of it."""
        if fault is None:
            yield
            return
        failing = Failing(fault)
        try:
            with failing:
                yield
        except (OSError, ShmError, KeyboardInterrupt) as error:
            if not failing.has_happened:
                raise
            error.__traceback__ = None  # from Python 3.12 on, a cycle: what the step had in hand would stay
        if failing.has_happened:
            self.unraisable.clear()
            self.was_interrupted |= fault.error == INTERRUPT
