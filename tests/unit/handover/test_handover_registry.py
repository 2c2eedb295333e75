"""What a process offers: keys that are used once, and a server as long as there are any."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shm_backend_utils
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.handover.peers import Peer
from shm_backend_utils.memory.handover.server import HandoverRegistry, Offer
from shm_backend_utils.protocol.handover import SealedKey, parse_sealed_key
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import Region, ask, connect, count_open, servers, settles
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


def test_without_a_thread_there_is_an_error_and_a_server_later(
    registry: HandoverRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(MachineError, match="takes a thread, and this process can have no more.*ulimit -u"):
            Region(registry)
    assert is_there(Region(registry).key)


def test_withdrawing_twice_or_what_is_unknown_is_fine(registry: HandoverRegistry) -> None:
    region, kept = Region(registry), Region(registry)
    for number in (region.number, region.number, 10**9):
        registry.withdraw(number)
    assert kept.is_given()


def test_a_finalizer_may_withdraw_inside_a_locked_section(registry: HandoverRegistry) -> None:
    region = Region(registry)
    with registry._lock:
        registry.withdraw(region.number)
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


def test_what_is_offered_while_another_peer_is_accepted_is_handed_over(
    registry: HandoverRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_interrupt_at_any_line_of_withdrawing_leaves_nothing_if_done_again(
    registry: HandoverRegistry,
) -> None:
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
