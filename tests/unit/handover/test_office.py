"""What a process offers: keys that are used once, and a desk as long as there are any."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import shm_backend_utils
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.access import PRIVATE
from shm_backend_utils.memory.handover.server import HandoverRegistry
from shm_backend_utils.protocol.handover import SealedKey, parse_sealed_key
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import TOKEN, Region, ask, connect, count_open, desks, settles

FOLDER = Path(shm_backend_utils.__file__).parent / "memory" / "handover"


def is_there(key: SealedKey) -> bool:
    try:
        connect(key).close()
    except ConnectionRefusedError:
        return False
    return True


def test_all_regions_of_a_process_are_at_one_desk_under_numbers_of_their_own(office: HandoverRegistry) -> None:
    regions = [Region(office) for _ in range(10)]
    keys = [region.key for region in regions]
    assert (len({key.desk for key in keys}), desks()) == (1, 1)
    assert all(region.is_given() for region in regions)
    assert len({key.number for key in keys}) == len(keys)
    assert [parse_sealed_key(str(key)) for key in keys] == keys


def test_the_desk_ends_with_its_last_key_and_the_next_one_has_another_name(office: HandoverRegistry) -> None:
    before = count_open()
    first, second = office.new_key(), office.new_key()
    office.withdraw(first)
    assert is_there(second)
    office.withdraw(second)
    assert settles(lambda: desks() == 0)
    assert not is_there(second)
    assert settles(lambda: count_open() == before)
    third = office.new_key()
    assert third.desk != second.desk
    assert third.number not in (first.number, second.number)
    assert is_there(third)


def test_a_key_that_nobody_has_any_more_keeps_no_desk(office: HandoverRegistry) -> None:
    key: SealedKey | None = office.new_key()
    assert desks() == 1
    del key
    assert settles(lambda: desks() == 0)
    assert office._issued == {}


def test_without_a_thread_there_is_an_error_and_a_desk_later(
    office: HandoverRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(MachineError, match="takes a thread, and this process can have no more.*ulimit -u"):
            office.new_key()
    assert is_there(office.new_key())


def test_what_is_offered_stays_when_nobody_has_the_key_object(office: HandoverRegistry) -> None:
    region = Region(office)
    region.key = SealedKey(str(region.key.desk), region.key.number)
    assert region.is_given()


def test_withdrawing_twice_or_what_is_unknown_is_fine(office: HandoverRegistry) -> None:
    region, kept = Region(office), Region(office)
    for key in (region.key, region.key, SealedKey("0" * 32, 10**9)):
        office.withdraw(key)
    assert kept.is_given()


def test_what_was_withdrawn_cannot_be_offered(office: HandoverRegistry) -> None:
    region, key = Region(office), office.new_key()
    office.withdraw(key)
    with pytest.raises(ValueError, match="under a key that was withdrawn"):
        office.offer(key, TOKEN, PRIVATE, region.copy)


def test_a_finalizer_may_withdraw_inside_a_locked_section(office: HandoverRegistry) -> None:
    region = Region(office)
    with office._lock:
        office.withdraw(region.key)
    assert settles(lambda: desks() == 0)


def test_many_threads_offer_and_withdraw_at_once(office: HandoverRegistry) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                region = Region(office)
                assert region.is_given()
                office.withdraw(region.key)
                assert office.new_key() != office.new_key()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_an_interrupt_at_any_line_leaves_nothing_once_the_key_is_withdrawn(office: HandoverRegistry) -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        made: list[SealedKey] = []

        def work() -> None:
            made.append(office.new_key())  # noqa: B023
            Region(office, key=made[0])  # noqa: B023

        was_interrupted = Interrupts(FOLDER).at(line, work)
        for key in made:
            office.withdraw(key)
        made.clear()
        told = f"after an interrupt at line {line}"
        assert settles(lambda: desks() == 0), f"the desk goes on {told}"
        assert (office._offers, office._issued) == ({}, {}), f"a key is left {told}"
        assert settles(lambda: count_open() == before), f"descriptors are left open {told}"
        line += 1
    assert line > 10


def test_an_interrupt_at_any_line_of_withdrawing_leaves_nothing_when_it_is_done_again(office: HandoverRegistry) -> None:
    before = count_open()
    was_interrupted, line = True, 1
    while was_interrupted:
        key = Region(office).key
        was_interrupted = Interrupts(FOLDER).at(line, lambda: office.withdraw(key))  # noqa: B023
        office.withdraw(key)
        assert ask_or_refused(key), f"it is still given after an interrupt at line {line}"
        assert settles(lambda: desks() == 0), f"the desk goes on after an interrupt at line {line}"
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
    from shm_backend_utils.memory.access import PRIVATE
    from shm_backend_utils.memory.handover.server import REGISTRY
    from tests.unit.handover.asking import TOKEN, Region, ask, connect, count_open, desks, settles

    before = count_open()
    region, issued = Region(REGISTRY), REGISTRY.new_key()
    silent = connect(region.key)
    assert region.is_given()  # so that the silent one was accepted
    own = 2  # the region's memory, and this end of the silent connection
"""


@pytest.mark.parametrize("ending", ["os._exit", "sys.exit"])
def test_a_forked_child_has_a_desk_of_its_own_and_the_parents_goes_on(ending: str) -> None:
    run_program(
        ending,
        FORKED,
        """
        def work():
            global issued
            assert (count_open(), desks()) == (before + 1, 0), "it has more than the silent connection"
            REGISTRY.withdraw(region.key)
            try:
                REGISTRY.offer(issued, TOKEN, PRIVATE, region.copy)
            except ValueError:
                issued = None
            childs = Region(REGISTRY)
            assert childs.key.desk != region.key.desk
            assert childs.is_given() and region.is_given()  # the latter at the parent's desk
            REGISTRY.withdraw(childs.key)
            assert settles(lambda: desks() == 0)

        in_child(work)
        assert region.is_given()
        REGISTRY.offer(issued, TOKEN, PRIVATE, region.copy)
        assert ask(issued) is not None
        for key in (region.key, issued):
            REGISTRY.withdraw(key)
        assert settles(lambda: desks() == 0)
        assert silent.recv(1) == b""
        assert settles(lambda: count_open() == before + own)
        """,
    )
