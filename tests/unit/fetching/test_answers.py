"""What a client may answer: a sealed region, or anything else, which is refused; and interrupts meanwhile."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import signal
import socket
from collections.abc import Iterator

import pytest

from shm_backend_utils.errors import ClosedError, RegionGoneError, RegionRefusedError
from shm_backend_utils.memory.descriptors import Descriptor, NoDescriptorsError
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.protocol.handover import QUESTION_LENGTH, Question, SealedKey, decode_question, encode_answer
from tests.unit.fetching.scripted_desk import FIELD, PAGE, TOKEN, Script, ScriptedDesk, give, memfd

REFUSED = encode_answer(is_given=False)


def anybody(uid: int) -> bool:
    return True


def fetch_from(script: Script, fetcher: Fetcher, field: str = FIELD) -> None:
    with ScriptedDesk(script) as desk, fetcher.fetch(desk.key, TOKEN, field, anybody):
        pass


def test_an_honest_client_is_asked_for_one_region_and_hands_it_over(fetcher: Fetcher) -> None:
    region = memfd()
    status = os.fstat(region.fileno())
    os.pwrite(region.fileno(), b"here", 0)
    asked = []

    def script(connection: socket.socket) -> None:
        asked.append(decode_question(connection.recv(QUESTION_LENGTH + 1)))
        socket.send_fds(connection, [encode_answer(is_given=True)], [region.fileno()])

    with ScriptedDesk(script) as desk, fetcher.fetch(desk.key, TOKEN, FIELD, anybody) as file:
        assert os.path.samestat(file.status, status)
        assert (file.key, file.field, file.status.st_size) == (str(desk.key), FIELD, PAGE)
        assert file.read(4) == b"here"
        file.check_size(PAGE)
        file.check_space(PAGE)
    assert asked == [Question(desk.key.number, bytes.fromhex(TOKEN))]


def test_it_is_opened_anew_so_that_its_locks_are_its_own(fetcher: Fetcher) -> None:
    region = memfd()
    kept = os.dup(region.fileno())
    with ScriptedDesk(give(region)) as desk, fetcher.fetch(desk.key, TOKEN, FIELD, anybody) as file:
        descriptor = file.detach()
        assert not os.get_inheritable(descriptor.fileno())
        os.lseek(kept, 100, os.SEEK_SET)
        assert os.lseek(descriptor.fileno(), 0, os.SEEK_CUR) == 0  # as locks, it belongs to the description
        descriptor.close()
    os.close(kept)


def test_of_a_client_that_is_gone_nothing_is_left(fetcher: Fetcher) -> None:
    with pytest.raises(RegionGoneError, match=r"handed over by nobody .* network namespace .*region=\"system\""):
        fetcher.fetch(SealedKey(secrets.token_hex(16), 1), TOKEN, FIELD, anybody)


def test_a_region_that_its_client_gives_no_longer_is_gone(fetcher: Fetcher) -> None:
    with pytest.raises(RegionGoneError, match="handed over no longer; its owner closed it, or its token is another"):
        fetch_from(give(answer=REFUSED), fetcher)


@pytest.mark.parametrize(
    "answer",
    [b"?", encode_answer(is_given=True)[:-1], encode_answer(is_given=True) + b"\0", bytes(16), bytes(100_000)],
    ids=["one byte", "a byte less", "a byte more", "zeros", "many zeros"],
)
@pytest.mark.parametrize("comes_with_one", [False, True])
def test_what_is_no_answer_is_refused(fetcher: Fetcher, answer: bytes, comes_with_one: bool) -> None:
    with pytest.raises(RegionRefusedError, match="is no answer of this version"):
        fetch_from(give(*[memfd()] * comes_with_one, answer=answer), fetcher)


def test_an_answer_that_says_otherwise_than_what_came_with_it_is_refused(fetcher: Fetcher) -> None:
    for script in (give(), give(memfd(), answer=REFUSED)):
        with pytest.raises(RegionRefusedError, match="says otherwise than what came with it"):
            fetch_from(script, fetcher)


@pytest.mark.parametrize("count", [2, 3, 253])
def test_more_than_one_descriptor_is_refused(fetcher: Fetcher, count: int) -> None:
    with pytest.raises(RegionRefusedError, match="more than one descriptor"):
        fetch_from(give(*(memfd() for _ in range(count))), fetcher)


def answer_nothing(connection: socket.socket, region: Descriptor) -> None:
    give(region, answer=b"")(connection)


@pytest.mark.parametrize(
    "script",
    [
        lambda connection: connection.recv(QUESTION_LENGTH),
        lambda connection: None,
        lambda connection: connection.recv(QUESTION_LENGTH, socket.MSG_PEEK),
        lambda connection: answer_nothing(connection, memfd()),
    ],
    ids=["after the question", "before the question", "with the question unread", "with a descriptor"],
)
def test_of_who_hangs_up_nothing_is_left(fetcher: Fetcher, script: Script) -> None:
    hung_up = r"handed over no longer: its client hung up, .*PoolOptions\(access=...\)"
    with pytest.raises(RegionGoneError, match=hung_up):
        fetch_from(script, fetcher)


def test_after_the_end_of_a_session_nothing_is_fetched(fetcher: Fetcher) -> None:
    fetcher.close()
    fetcher.close()
    with pytest.raises(ClosedError):
        fetcher.fetch(SealedKey(secrets.token_hex(16), 1), TOKEN, FIELD, anybody)


# Without descriptors


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
def test_a_process_without_descriptors_to_connect_says_so(fetcher: Fetcher) -> None:
    leave(0)
    with pytest.raises(NoDescriptorsError, match="a shared-memory region takes two file descriptors"):
        fetcher.fetch(SealedKey(secrets.token_hex(16), 1), TOKEN, FIELD, anybody)


@pytest.mark.usefixtures("kept_limit")
@pytest.mark.parametrize("left", [0, 1], ids=["to receive", "to reopen"])
def test_a_process_without_descriptors_says_so(fetcher: Fetcher, left: int) -> None:
    region = memfd()

    def script(connection: socket.socket) -> None:
        connection.recv(QUESTION_LENGTH)
        leave(left)
        socket.send_fds(connection, [encode_answer(is_given=True)], [region.fileno()])
        connection.recv(1)

    with ScriptedDesk(script) as desk, pytest.raises(NoDescriptorsError, match="takes two file descriptors"):
        fetcher.fetch(desk.key, TOKEN, FIELD, anybody)


STEPS = 300
STEP_S = 1e-5  # to 3 ms, which a fetching takes most often


class Interrupt(BaseException):
    """Of a signal's handler."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """Have SIGALRM raise."""

    def handle(*_: object) -> None:
        raise Interrupt

    old = signal.signal(signal.SIGALRM, handle)
    yield
    signal.signal(signal.SIGALRM, old)


def is_interrupted(fetcher: Fetcher, after_s: float) -> bool:
    """Fetch a region, and return whether the timer came before it was there."""
    with ScriptedDesk(give(memfd())) as desk:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            file = fetcher.fetch(desk.key, TOKEN, FIELD, lambda uid: True)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            return True
        file.close()
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come in a finalizer
@pytest.mark.usefixtures("alarm")
def test_wherever_an_interrupt_comes_nothing_stays_open(fetcher: Fetcher) -> None:
    """The fixture of every test here counts descriptors."""
    interrupted = 0
    for step in range(STEPS):
        interrupted += is_interrupted(fetcher, (step + 1) * STEP_S)
    assert 0 < interrupted < STEPS
