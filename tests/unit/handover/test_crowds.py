"""Many at a desk at once, who say nothing; and a process that has no descriptors for them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shm_backend_utils.memory.handover import desk
from shm_backend_utils.memory.handover.office import Office
from shm_backend_utils.protocol.handover import Question, SealedKey, decode_answer, encode_question, parse_sealed_key
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import LONG_S, Region, ask, connect, count_open, settles

CROWD, LARGE_CROWD = 1_500, 10_000
NEVER_S = 1e6


def is_broken_off(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_who_says_nothing_is_waited_for_a_while_and_others_are_served(office: Office) -> None:
    region = Region(office)
    with connect(region.key) as silent:
        assert region.is_given()
        assert silent.recv(1) == b""


def test_who_speaks_late_is_answered(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_SILENCE_S", NEVER_S)
    region = Region(office)
    with connect(region.key) as late:
        assert region.is_given()  # it has been accepted before
        late.send(encode_question(Question(region.key.number, b"another's token!")))
        assert decode_answer(late.recv(4096)) is False


def test_who_has_spoken_in_time_is_answered_however_late_the_desk_is(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_late(late: desk.Desk) -> None:
        time.sleep(0.1 if late._connected else 0)
        serve(late)

    serve = desk.Desk._serve
    monkeypatch.setattr(desk.Desk, "_serve", serve_late)
    monkeypatch.setattr(desk, "_SILENCE_S", 0.0)
    region = Region(office)
    with connect(region.key) as asking:
        listening = office._desk
        assert listening is not None
        assert settles(lambda: bool(listening._connected))
        asking.send(encode_question(Question(region.key.number, b"another's token!")))
        assert decode_answer(asking.recv(4096)) is False


def test_the_oldest_of_many_silent_ones_make_way(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_SILENCE_S", NEVER_S)
    region = Region(office)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(region.key)) for _ in range(desk._MOST_SILENT + 5)]
        assert region.is_given()  # they have been accepted before
        assert [is_broken_off(each) for each in silent] == [True] * 5 + [False] * desk._MOST_SILENT


def test_who_is_silent_when_the_desk_ends_is_told(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_SILENCE_S", NEVER_S)
    region = Region(office)
    with connect(region.key) as silent:
        office.withdraw(region.key)
        with contextlib.suppress(ConnectionResetError):  # it was not accepted yet
            assert silent.recv(1) == b""


@pytest.mark.parametrize("speaks", [True, False], ids=["garbage", "silent"])
def test_a_crowd_holds_nobody_up_for_long(speaks: bool, office: Office, request: pytest.FixtureRequest) -> None:
    region = Region(office)
    before = count_open()
    for number in range(LARGE_CROWD if request.config.getoption("--all") else CROWD):
        with connect(region.key) as connection:
            if speaks:
                with contextlib.suppress(ConnectionError):
                    connection.send(b"garbage")
        if number % 500 == 0:
            assert region.is_given()
    assert region.is_given()
    assert settles(lambda: count_open() <= before)


# A process that connects for ever, and keeps the newest connections.
CROWDING = """
import sys
from tests.unit.handover.asking import connect
from shm_backend_utils.protocol.handover import parse_sealed_key

key, held = parse_sealed_key(sys.argv[1]), []
while True:
    held.append(connect(key))
    if len(held) == 200:
        print(flush=True)
    if len(held) > 200:
        held.pop(0).close()
"""


def test_honest_models_are_answered_while_others_fill_the_desk(office: Office) -> None:
    region, given = Region(office), 0
    with subprocess.Popen(
        [sys.executable, "-c", CROWDING, str(region.key)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as crowd:
        assert crowd.stdout
        try:
            crowd.stdout.readline()
            for _ in range(10):
                with contextlib.suppress(ConnectionError):  # made way before it could speak
                    given += region.is_given()
        finally:
            crowd.kill()
    assert given > 5


# A process with hardly any descriptors, which offers a region and says when its threads have used how much time.
SHORT = """
import os, resource, sys, time
from tests.unit.forks.programs import run_program
from tests.unit.handover.asking import Region, count_open
from shm_backend_utils.memory.handover.office import Office

office = Office()
region = Region(office)
room = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (count_open() - 1 + room, 4096))
print(region.key, flush=True)
sys.stdin.readline()
before = time.process_time()
sys.stdin.readline()
print(time.process_time() - before, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))  # glibc opens a library for a thread that ends with Python
office.withdraw(region.key)
"""


@contextlib.contextmanager
def a_process_short_of_descriptors(room: int) -> Iterator[tuple[SealedKey, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", SHORT, str(room)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        key = parse_sealed_key(process.stdout.readline().strip())
        assert key is not None
        yield key, process
        process.stdin.close()
        process.stdin = None
        assert process.wait(LONG_S) == 0


def test_a_process_without_descriptors_waits_and_serves_when_it_has_some() -> None:
    with a_process_short_of_descriptors(room=3) as (key, process):
        assert process.stdin
        assert process.stdout
        silent = [connect(key) for _ in range(20)]
        print(file=process.stdin, flush=True)
        assert silent[0].recv(1) == b""  # they make way
        for each in silent:
            each.close()
        assert settles(lambda: ask(key) is not None)
        print(file=process.stdin, flush=True)
        process.stdout.readline()


def test_a_process_without_any_descriptors_sleeps() -> None:
    with a_process_short_of_descriptors(room=0) as (key, process), connect(key) as waiting:
        assert process.stdin
        assert process.stdout
        print(file=process.stdin, flush=True)
        time.sleep(1.0)
        assert not is_broken_off(waiting)
        print(file=process.stdin, flush=True)
        assert float(process.stdout.readline()) < 0.5  # of a second


def test_a_process_without_descriptors_is_told_and_may_try_again() -> None:
    program = """
        import resource, threading
        from shm_backend_utils.memory.descriptors import NoDescriptorsError
        from shm_backend_utils.memory.handover.office import Office
        from tests.unit.handover.asking import count_open, desks, settles, Region

        office, before = Office(), count_open()
        for room in range(3):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, 4096))
            try:
                key = office.new_key()
            except NoDescriptorsError as error:
                assert room < 2, error
                assert "two file descriptors" in str(error), error
            else:
                assert room == 2
            assert settles(lambda: room == 2 or desks() == 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
        region = Region(office, key=key)
        assert region.is_given()
        office.withdraw(key)
    """
    run_program("sys.exit", program)
