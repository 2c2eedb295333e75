"""What a client may answer and hand over: a sealed region, or anything else, which is refused, and closed elsewhere."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import RegionGoneError, RegionRefusedError
from shm_backend_utils.memory import shared_file
from shm_backend_utils.memory.descriptors import Descriptor, NoDescriptorsError
from shm_backend_utils.memory.handover import fetching
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.handover.peers import Closer
from shm_backend_utils.memory.segment import SealedSegment
from shm_backend_utils.memory.shared_file import SealedFile
from shm_backend_utils.protocol.handover import QUESTION_LENGTH, Question, SealedKey, decode_question, encode_answer
from shm_backend_utils.testing.faults.system_calls import Interrupts
from tests.unit.fetching.conftest import ENOUGH_S, FIELD, PAGE, SEALS, TOKEN, Script, ScriptedServer, give, memfd
from tests.unit.handover.asking import a_lingering_socket

REFUSED = encode_answer(is_given=False)


def anybody(uid: int) -> bool:
    return True


def refused(fetcher: Fetcher, match: str, *handed_over: Descriptor) -> None:
    with ScriptedServer(give(*handed_over)) as server, pytest.raises(RegionRefusedError, match=match):
        fetcher.fetch(server.key, TOKEN, FIELD, anybody)


def pipe() -> Descriptor:
    reads, writes = os.pipe()
    kept = Descriptor(os.dup, reads)
    os.close(reads)
    os.close(writes)
    return kept


def unix_socket() -> Descriptor:
    with socket.socket(socket.AF_UNIX) as made:
        return Descriptor(os.dup, made.fileno())


@pytest.mark.parametrize(
    "opened",
    [
        lambda: Descriptor(os.open, "/", os.O_RDONLY | os.O_DIRECTORY),
        lambda: Descriptor(os.open, "/dev/null", os.O_RDWR),
        lambda: Descriptor(os.open, __file__, os.O_RDONLY),
        lambda: Descriptor(os.open, "/dev/shm", os.O_PATH),
        lambda: Descriptor(os.eventfd, 0),
        pipe,
        unix_socket,
    ],
)
def test_what_is_no_memfd_is_refused(fetcher: Fetcher, opened: Callable[[], Descriptor]) -> None:
    refused(fetcher, "handed over no memfd; expected a sealed one", opened())


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, SEALS | fcntl.F_SEAL_WRITE])
def test_a_memfd_is_taken_whatever_is_sealed_and_mapped_if_it_can_be_written_to(fetcher: Fetcher, seals: int) -> None:
    with ScriptedServer(give(memfd(seals))) as server, fetcher.fetch(server.key, TOKEN, FIELD, anybody) as file:
        file.check_size(PAGE)
        if seals & fcntl.F_SEAL_WRITE:
            with pytest.raises(RegionRefusedError, match="the server cannot map its"):
                SealedSegment.map(file, PAGE)


def test_a_memfd_that_may_not_be_opened_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    received = memfd()
    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(RegionRefusedError, match=r"cannot open it: Permission denied; .* PoolOptions\(access=...\)"):
        SealedFile.take("key", received, FIELD)


def test_a_lease_of_its_clients_holds_nobody_up(fetcher: Fetcher) -> None:
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    made = memfd()
    leased = Descriptor(os.open, f"/proc/self/fd/{made.fileno()}", os.O_RDWR)  # only who has opened it may lease it
    made.close()
    fcntl.fcntl(leased.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
    refused(fetcher, "cannot open it: Resource temporarily unavailable", leased)
    signal.signal(signal.SIGIO, before)


def test_holes_are_told_and_parts_of_pages_refused(fetcher: Fetcher) -> None:
    made = memfd(0)
    os.ftruncate(made.fileno(), 3 * PAGE)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, SEALS)
    with ScriptedServer(give(made)) as server, fetcher.fetch(server.key, TOKEN, FIELD, anybody) as file:
        file.check_size(3 * PAGE)
        file.check_space(PAGE)
        with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} of its {3 * PAGE} bytes, and holes"):
            file.check_space(3 * PAGE)
        with pytest.raises(RegionRefusedError, match=f"claims 1 bytes; expected whole pages of {PAGE}"):
            file.check_space(1)


def test_huge_pages_are_refused_as_a_hole_in_them_may_end_the_model() -> None:
    huge = Descriptor(os.memfd_create, "huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)  # takes no huge page yet
    page = os.fstatvfs(huge.fileno()).f_bsize
    assert page > PAGE
    os.ftruncate(huge.fileno(), page)
    fcntl.fcntl(huge.fileno(), fcntl.F_ADD_SEALS, SEALS)
    with SealedFile.take("key", huge, FIELD) as file:
        assert file.read(4) == bytes(4)
        with pytest.raises(RegionRefusedError, match=f"its pages have {page} bytes; expected pages of {PAGE}"):
            file.check_space(page)


@pytest.fixture
def lingering() -> Iterator[Descriptor]:
    with a_lingering_socket() as (slow, peer):
        kept = Descriptor(os.dup, slow.fileno())
        slow.close()
        yield kept
        peer.close()  # before it has read everything, which ends the waiting
        assert kept.fileno() == -1


class SlowCloser(Closer):
    """Closes nothing before the server has let go of what it has handed over: who lets go of it last, lingers."""

    def __init__(self, handed_over: Descriptor) -> None:
        super().__init__()
        self._handed_over = handed_over

    def close(self, what: socket.socket | Descriptor) -> None:
        while self._handed_over.fileno() >= 0:
            time.sleep(0.001)
        time.sleep(0.01)  # it is marked as closed a moment before
        super().close(what)


def test_what_lingers_is_closed_by_somebody_else(lingering: Descriptor) -> None:
    refused(Fetcher(ENOUGH_S, SlowCloser(lingering)), "no memfd", lingering)


def fetch_from(script: Script, fetcher: Fetcher, field: str = FIELD) -> None:
    with ScriptedServer(script) as server, fetcher.fetch(server.key, TOKEN, field, anybody):
        pass


def test_an_honest_client_is_asked_for_one_region_and_hands_it_over(fetcher: Fetcher) -> None:
    region = memfd()
    status = os.fstat(region.fileno())
    os.pwrite(region.fileno(), b"here", 0)
    asked = []

    def script(connection: socket.socket) -> None:
        asked.append(decode_question(connection.recv(QUESTION_LENGTH + 1)))
        socket.send_fds(connection, [encode_answer(is_given=True)], [region.fileno()])

    with ScriptedServer(script) as server, fetcher.fetch(server.key, TOKEN, FIELD, anybody) as file:
        assert os.path.samestat(file.status, status)
        assert (file.key, file.field, file.status.st_size) == (str(server.key), FIELD, PAGE)
        assert file.read(4) == b"here"
        file.check_size(PAGE)
        file.check_space(PAGE)
        assert not os.get_inheritable(file.descriptor.fileno())
        os.lseek(region.fileno(), 100, os.SEEK_SET)
        assert os.lseek(file.descriptor.fileno(), 0, os.SEEK_CUR) == 0, "it is opened anew: its locks are its own"
    assert asked == [Question(server.key.number, bytes.fromhex(TOKEN))]


def test_what_its_client_gives_no_longer_or_who_is_gone_is_gone(fetcher: Fetcher) -> None:
    with pytest.raises(RegionGoneError, match=r"is not handed over .* network namespace .*region=\"system\""):
        fetcher.fetch(SealedKey(secrets.token_hex(16), 1), TOKEN, FIELD, anybody)
    with pytest.raises(RegionGoneError, match="no longer handed over; its owner closed it or changed its token"):
        fetch_from(give(answer=REFUSED), fetcher)


@pytest.mark.parametrize(
    "answer", [b"?", encode_answer(is_given=True)[:-1], encode_answer(is_given=True) + b"\0", bytes(16), bytes(100_000)]
)
@pytest.mark.parametrize("comes_with_one", [False, True])
def test_what_is_no_answer_is_refused(fetcher: Fetcher, answer: bytes, comes_with_one: bool) -> None:
    with pytest.raises(RegionRefusedError, match="is not one of this version of the protocol"):
        fetch_from(give(*[memfd()] * comes_with_one, answer=answer), fetcher)


def test_an_answer_that_says_otherwise_than_what_came_with_it_is_refused(fetcher: Fetcher) -> None:
    for script in (give(), give(memfd(), answer=REFUSED)):
        with pytest.raises(RegionRefusedError, match="contradicts the descriptors that came with it"):
            fetch_from(script, fetcher)
    for count in (2, 3, 253):
        with pytest.raises(RegionRefusedError, match="more than one descriptor"):
            fetch_from(give(*(memfd() for _ in range(count))), fetcher)


@pytest.mark.parametrize(
    "script",
    [
        lambda connection: connection.recv(QUESTION_LENGTH),
        lambda connection: None,
        lambda connection: connection.recv(QUESTION_LENGTH, socket.MSG_PEEK),
        lambda connection: give(memfd(), answer=b"")(connection),  # noqa: PLW0108  # made when it is called
    ],
)
def test_of_who_hangs_up_nothing_is_left(fetcher: Fetcher, script: Script) -> None:
    hung_up = r"no longer handed over: its client closed the connection; .*PoolOptions\(access=...\)"
    with pytest.raises(RegionGoneError, match=hung_up):
        fetch_from(script, fetcher)


@pytest.fixture
def kept_limit() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def leave(count: int) -> None:
    """Let this process open so many more descriptors."""
    gc.collect()  # what it closed afterwards would make room
    more = [os.dup(0) for _ in range(count + 1)]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (more[-1], most))
    for each in more:
        os.close(each)


@pytest.mark.usefixtures("kept_limit")
@pytest.mark.parametrize("left", [0, 1])  # to receive it, to reopen it
def test_a_process_without_descriptors_says_so(fetcher: Fetcher, left: int) -> None:
    region = memfd()

    def script(connection: socket.socket) -> None:
        connection.recv(QUESTION_LENGTH)
        leave(left)
        socket.send_fds(connection, [encode_answer(is_given=True)], [region.fileno()])
        connection.recv(1)

    with ScriptedServer(script) as server, pytest.raises(NoDescriptorsError, match="takes two file descriptors"):
        fetcher.fetch(server.key, TOKEN, FIELD, anybody)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a finalizer
def test_wherever_an_interrupt_comes_nothing_stays_open(fetcher: Fetcher) -> None:
    """The fixture of every test here counts descriptors."""
    interrupts = Interrupts(Path(fetching.__file__).parent, Path(shared_file.__file__))
    number, was_interrupted = 1, True
    while was_interrupted:
        with ScriptedServer(give(memfd())) as server:
            fetch = partial(fetcher.fetch, server.key, TOKEN, FIELD, anybody)
            was_interrupted = interrupts.at(number, lambda: fetch().close())  # noqa: B023
        number += 3
    assert number > 100
