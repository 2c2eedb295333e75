"""What a client may hand over: a memfd of a settled size, or anything else, which is refused, and closed elsewhere."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shm_backend_utils.errors import RegionRefusedError
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.handover.closing import Closer
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.memory.sealed import SealedSegment
from shm_backend_utils.memory.sealed_file import SealedFile
from tests.unit.fetching.conftest import ENOUGH_S
from tests.unit.fetching.scripted_desk import FIELD, PAGE, SEALS, TOKEN, ScriptedDesk, give, memfd

ENDLESS_S = 600  # longer than any test


def refused(fetcher: Fetcher, match: str, *handed_over: Descriptor) -> None:
    with ScriptedDesk(give(*handed_over)) as desk, pytest.raises(RegionRefusedError, match=match):
        fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True)


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
    ids=["directory", "/dev/null", "file on a disk", "path", "eventfd", "pipe", "socket"],
)
def test_what_is_no_memfd_is_refused(fetcher: Fetcher, opened: Callable[[], Descriptor]) -> None:
    refused(fetcher, "is no memfd; expected a sealed one", opened())


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK])
def test_a_memfd_is_taken_whatever_is_sealed_as_a_file_is_that_its_client_could_name(
    fetcher: Fetcher, seals: int
) -> None:
    with ScriptedDesk(give(memfd(seals))) as desk, fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True) as file:
        file.check_size(PAGE)


def test_a_memfd_that_cannot_be_written_to_is_refused_when_it_is_mapped(fetcher: Fetcher) -> None:
    with (
        ScriptedDesk(give(memfd(SEALS | fcntl.F_SEAL_WRITE))) as desk,
        fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True) as file,
        pytest.raises(RegionRefusedError, match="the server cannot map its"),
    ):
        SealedSegment.map(file, PAGE)


def test_a_memfd_that_may_not_be_opened_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    received = memfd()
    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(RegionRefusedError, match=r"cannot open it: Permission denied; .* PoolOptions\(access=...\)"):
        SealedFile.take("key", received, FIELD)


def test_what_was_received_is_closed_once_it_is_verified() -> None:
    received = memfd()
    with SealedFile.take("key", received, FIELD):
        assert received.fileno() == -1


@pytest.fixture
def _no_signals_of_leases() -> Iterator[None]:
    old = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, old)


@pytest.mark.usefixtures("_no_signals_of_leases")
def test_a_lease_of_its_clients_holds_nobody_up(fetcher: Fetcher) -> None:
    made = memfd()
    leased = Descriptor(os.open, f"/proc/self/fd/{made.fileno()}", os.O_RDWR)  # only who has opened it may lease it
    made.close()
    fcntl.fcntl(leased.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
    refused(fetcher, "cannot open it: Resource temporarily unavailable", leased)


def test_holes_are_told(fetcher: Fetcher) -> None:
    made = memfd(0)
    os.ftruncate(made.fileno(), 3 * PAGE)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, SEALS)
    with ScriptedDesk(give(made)) as desk, fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True) as file:
        file.check_size(3 * PAGE)
        file.check_space(PAGE)
        with pytest.raises(RegionRefusedError, match=f"memory for {PAGE} bytes of {3 * PAGE}, and else holes"):
            file.check_space(3 * PAGE)


def test_parts_of_pages_are_refused() -> None:
    refusal = pytest.raises(RegionRefusedError, match=f"claims 1 bytes; expected whole pages of {PAGE}")
    with SealedFile.take("key", memfd(SEALS), FIELD) as file, refusal:
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


# What takes long to close


@pytest.fixture
def lingering() -> Iterator[Descriptor]:
    """A TCP socket that waits, when it is closed, until its peer has read everything, which he never does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    with client:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while client.send(bytes(1 << 20)):
                pass
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, ENDLESS_S))
        kept = Descriptor(os.dup, client.fileno())
    yield kept
    with peer:  # who closes it before he has read everything ends the waiting
        assert kept.fileno() == -1


class SlowCloser(Closer):
    """Closes nothing before the desk has let go of what it has handed over: who lets go of it last, lingers."""

    def __init__(self, handed_over: Descriptor) -> None:
        super().__init__()
        self._handed_over = handed_over

    def close(self, what: socket.socket | Descriptor) -> None:
        while self._handed_over.fileno() >= 0:
            time.sleep(0.001)
        time.sleep(0.01)  # it is marked as closed a moment before
        super().close(what)


@pytest.fixture
def slow(lingering: Descriptor) -> Fetcher:
    return Fetcher(ENOUGH_S, SlowCloser(lingering))


def test_what_lingers_is_closed_by_somebody_else(slow: Fetcher, lingering: Descriptor) -> None:
    refused(slow, "is no memfd", lingering)


def test_what_lingers_behind_an_honest_one_is_not_closed_here_either(slow: Fetcher, lingering: Descriptor) -> None:
    refused(slow, "more than one descriptor", memfd(), lingering)


def test_what_lingers_in_a_second_message_is_not_closed_here_either(slow: Fetcher, lingering: Descriptor) -> None:
    answer = give(memfd())

    def script(connection: socket.socket) -> None:
        answer(connection)
        socket.send_fds(connection, [b"behind the answer"], [lingering.fileno()])
        lingering.close()

    with ScriptedDesk(script) as desk, slow.fetch(desk.key, TOKEN, FIELD, lambda uid: True) as file:
        file.check_size(PAGE)
