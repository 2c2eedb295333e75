"""What a process offers: keys that are used once, and a server as long as there are any; what it closes meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shm_backend_utils
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover.peers import MOST_THREADS, MOST_WAITING, Closer, Peer
from shm_backend_utils.memory.handover.server import HandoverRegistry, Offer
from shm_backend_utils.protocol.handover import SealedKey, parse_sealed_key
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import LONG_S, Region, ask, connect, count_open, servers, settles
from tests.unit.side_by_side import side_by_side

FOLDER = Path(shm_backend_utils.__file__).parent / "memory" / "handover"


def is_there(key: SealedKey) -> bool:
    try:
        connect(key).close()
    except ConnectionRefusedError:
        return False
    return True


def test_all_regions_of_a_process_are_at_one_server_under_numbers_of_their_own(registry: HandoverRegistry) -> None:
    regions = [Region(registry) for _ in range(10)]
    keys = [region.key for region in regions]
    assert (len({key.socket for key in keys}), servers()) == (1, 1)
    assert all(region.is_given() for region in regions)
    assert len({key.number for key in keys}) == len(keys)
    assert [parse_sealed_key(str(key)) for key in keys] == keys


def test_the_server_ends_with_its_last_region_and_the_next_one_has_another_name(registry: HandoverRegistry) -> None:
    first, second = Region(registry), Region(registry)
    before = count_open()
    registry.withdraw(first.number)
    assert is_there(second.key)
    registry.withdraw(second.number)
    assert settles(lambda: servers() == 0)
    assert not is_there(second.key)
    assert settles(lambda: count_open() < before)
    third = Region(registry)
    assert third.key.socket != second.key.socket
    assert third.number not in (first.number, second.number)
    assert is_there(third.key)


def test_without_a_thread_there_is_an_error(registry: HandoverRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(MachineError, match="takes a thread, and this process can have no more.*ulimit -u"):
            Region(registry)
    assert is_there(Region(registry).key)


def test_withdrawing_twice_or_what_is_unknown_or_in_a_finalizer_is_fine(registry: HandoverRegistry) -> None:
    region, kept = Region(registry), Region(registry)
    for number in (region.number, region.number, 10**9):
        registry.withdraw(number)
    assert kept.is_given()
    with registry._lock:  # a finalizer may come anywhere
        registry.withdraw(kept.number)
    assert settles(lambda: servers() == 0)


def test_many_threads_offer_and_withdraw_at_once(registry: HandoverRegistry) -> None:
    def work() -> None:
        for _ in range(100):
            region = Region(registry)
            assert region.is_given()
            registry.withdraw(region.number)

    side_by_side(*[work] * 4)


class _Slow(dict[int, Offer]):
    def __bool__(self) -> bool:
        found = len(self) > 0
        time.sleep(0.003)
        return found


def test_what_is_offered_while_the_server_looks_whether_to_end_is_handed_over(registry: HandoverRegistry) -> None:
    registry._offers = _Slow()
    for _ in range(20):
        region = Region(registry)
        time.sleep(0.004)  # a server that ends is gone then
        assert region.is_given()
        registry.withdraw(region.number)


def test_what_is_offered_meanwhile_is_handed_over(registry: HandoverRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    is_accepting, goes_on, may_end = threading.Event(), threading.Event(), threading.Event()
    peer_of, ends = Peer.of, registry._ends

    def slow(connection: socket.socket) -> Peer:
        is_accepting.set()
        assert goes_on.wait(10)
        return peer_of(connection)

    monkeypatch.setattr(registry, "_ends", lambda server: may_end.is_set() and ends(server))
    gone = Region(registry)
    registry.withdraw(gone.number)
    monkeypatch.setattr(Peer, "of", slow)
    with ThreadPoolExecutor(1) as threads, contextlib.closing(connect(gone.key)):  # a model that is late
        assert is_accepting.wait(10)
        region = Region(registry)
        is_given = threads.submit(region.is_given)
        time.sleep(0.05)  # it has connected
        goes_on.set()
        assert is_given.result()
    may_end.set()


def test_an_interrupt_at_any_line_leaves_nothing_once_the_region_is_withdrawn(registry: HandoverRegistry) -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        was_interrupted = Interrupts(FOLDER).at(line, lambda: Region(registry))
        for number in list(registry._offers):
            registry.withdraw(number)
        told = f"after an interrupt at line {line}"
        assert settles(lambda: servers() == 0), f"the server goes on {told}"
        assert settles(lambda: count_open() == before), f"descriptors are left open {told}"
        line += 1
    assert line > 10


def test_an_interrupt_at_any_line_of_withdrawing_leaves_nothing_if_done_again(registry: HandoverRegistry) -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        region = Region(registry)
        number, key = region.number, region.key
        del region
        was_interrupted = Interrupts(FOLDER).at(line, lambda: registry.withdraw(number))  # noqa: B023
        registry.withdraw(number)
        assert ask_or_refused(key), f"it is still given after an interrupt at line {line}"
        assert settles(lambda: servers() == 0), f"the server goes on after an interrupt at line {line}"
        assert settles(lambda: count_open() == before)
        line += 1


def ask_or_refused(key: SealedKey) -> bool:
    """Return whether a region is given no longer."""
    try:
        return ask(key) is None
    except OSError:
        return True


def test_a_process_may_end_with_regions_offered_and_says_nothing() -> None:
    program = """
from shm_backend_utils.memory.handover.server import REGISTRY
from tests.unit.handover.asking import Region
region = Region(REGISTRY)
assert region.is_given()
"""
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


FORKED = """
    from shm_backend_utils.memory.handover.server import REGISTRY
    from tests.unit.handover.asking import Region, connect, count_open, servers, settles

    before = count_open()
    region = Region(REGISTRY)
    silent = connect(region.key)
    assert region.is_given()  # so that the silent one was accepted
    own = 2  # the region's memory, and this end of the silent connection
"""


@pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
def test_a_forked_child_has_a_server_of_its_own_and_the_parents_goes_on(ending: str) -> None:
    run_program(
        ending,
        FORKED,
        """
        def work():
            assert (count_open(), servers()) == (before + 1, 0), "it has more than the silent connection"
            REGISTRY.withdraw(region.number)
            childs = Region(REGISTRY)
            assert childs.key.socket != region.key.socket
            assert childs.is_given() and region.is_given()  # the latter at the parent's server
            REGISTRY.withdraw(childs.number)
            assert settles(lambda: servers() == 0)

        in_child(work)
        assert region.is_given()
        REGISTRY.withdraw(region.number)
        assert settles(lambda: servers() == 0)
        assert silent.recv(1) == b""
        assert settles(lambda: count_open() == before + own)
        """,
    )


# What may be slow to close is closed in threads that nobody waits for


class Slow:
    """What is closed when a test lets it; at once in a forked child, as it is open in the parent."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def close(self) -> None:
        self.begun.set()
        if os.getpid() == self.process_id:
            self.may_end.wait(LONG_S)


class Failing:
    def close(self) -> None:
        raise OSError("it cannot be closed")


def an_open_one() -> Descriptor:
    return Descriptor(os.open, "/dev/null", os.O_RDONLY | os.O_CLOEXEC)


def closers() -> int:
    return [thread.name for thread in threading.enumerate()].count("shm-closer")


def close(closer: Closer, what: Any) -> None:
    closer.close(what)


def hang(closer: Closer, count: int) -> list[Slow]:
    slow = [Slow() for _ in range(count)]
    for each in slow:
        close(closer, each)
    assert all(each.begun.wait(LONG_S) for each in slow)
    return slow


def test_slow_ones_keep_nobody_waiting_as_long_as_they_are_few() -> None:
    closer = Closer()
    slow = hang(closer, MOST_THREADS - 1)
    for what in [an_open_one() for _ in range(MOST_WAITING)]:
        closer.close(what)
        assert settles(lambda: what.fileno() == -1)  # noqa: B023
    assert settles(lambda: closer.waiting == len(slow))
    assert not closer.is_full
    for each in slow:
        each.may_end.set()
    assert settles(lambda: closer.waiting == 0)


def test_it_is_full_when_many_wait() -> None:
    closer = Closer()
    slow = hang(closer, MOST_THREADS)
    for _ in range(MOST_WAITING - MOST_THREADS - 1):
        close(closer, Failing())
    before = closer.is_full
    close(closer, Failing())
    assert (before, closer.is_full) == (False, True)
    for each in slow:
        each.may_end.set()
    assert settles(lambda: closer.waiting == 0)


def test_one_that_cannot_be_closed_is_in_nobodys_way() -> None:
    closer, what = Closer(), an_open_one()
    close(closer, Failing())
    closer.close(what)
    assert settles(lambda: what.fileno() == -1)


def test_the_thread_ends_when_there_is_nothing_to_do_and_the_next_one_has_a_thread_again() -> None:
    closer, before = Closer(), closers()
    for _ in range(2):
        what = an_open_one()
        closer.close(what)
        assert settles(lambda: what.fileno() == -1)  # noqa: B023
        assert settles(lambda: closers() <= before)


def test_without_a_thread_all_waits_until_one_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    closer, what = Closer(), an_open_one()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        closer.close(what)
    assert (closer.waiting, what.fileno() >= 0) == (1, True)
    closer.close(an_open_one())
    assert settles(lambda: closer.waiting == 0)
    assert what.fileno() == -1


def test_a_burst_needs_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    closer, begun, start = Closer(), [], threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    for _ in range(100):
        closer.close(an_open_one())
    assert settles(lambda: closer.waiting == 0)
    assert len(begun) <= MOST_THREADS


def test_what_an_interrupt_leaves_open_is_closed_with_the_next_one() -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        closer = Closer()
        was_interrupted = Interrupts(FOLDER / "peers.py").at(line, lambda: closer.close(an_open_one()))  # noqa: B023
        closer.close(an_open_one())
        assert settles(lambda: count_open() == before), f"it is left open after an interrupt at line {line}"
        line += 1
    assert line > 3


def test_a_forked_child_has_nothing_of_it_and_can_close() -> None:
    run_program(
        "os._exit",
        """
        import threading
        from tests.unit.handover.asking import count_open, settles
        from tests.unit.handover.test_handover_registry import MOST_THREADS, Closer, an_open_one, hang

        before, closer = count_open(), Closer()
        slow = hang(closer, MOST_THREADS)
        left = an_open_one()
        closer.close(left)

        def work():
            assert (closer.waiting, count_open()) == (0, before)
            own = an_open_one()
            closer.close(own)
            assert settles(lambda: own.fileno() == -1)

        in_child(work)
        assert left.fileno() >= 0, "the child has closed its parent's"
        for each in slow:
            each.may_end.set()
        assert settles(lambda: left.fileno() == -1)
        """,
    )
