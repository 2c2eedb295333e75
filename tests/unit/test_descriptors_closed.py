"""What could not be opened, made, mapped or taken keeps no descriptor; what was has the descriptors that it needs."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shm_backend_utils.errors import ClosedError, RegionRefusedError
from shm_backend_utils.memory import segment as segment_module
from shm_backend_utils.memory.access import Access
from shm_backend_utils.memory.descriptors import NoDescriptorsError
from shm_backend_utils.memory.locks import SharedLease, SlotLease, has_users, use
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import SharedFile

PAGE = 4096
SHM = Path("/dev/shm")
FIELD = "regions[1]"


@pytest.fixture
def key() -> Iterator[str]:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    yield key
    (SHM / key).unlink(missing_ok=True)


@pytest.fixture
def file_key(key: str) -> str:
    """The name of a file of one page."""
    (SHM / key).write_bytes(bytes(PAGE))
    return key


@pytest.fixture
def zero() -> Iterator[None]:
    """Have descriptor 0 free, as in a process that was started without a standard input."""
    kept = os.dup(0)
    os.close(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


def descriptors() -> set[str]:
    """Return which descriptors are open, the one that this takes aside."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}  # noqa: PTH110, PTH208


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_whose_status_is_not_to_be_had_is_closed_and_the_error_told(
    file_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            SharedFile.open(file_key, FIELD)
    assert descriptors() == before


def test_what_is_no_regular_file_is_closed(key: str) -> None:
    os.mkfifo(SHM / key)
    before = descriptors()
    with pytest.raises(RegionRefusedError, match="not a regular"):
        SharedFile.open(key, FIELD)
    assert descriptors() == before


def test_a_file_that_was_looked_at_and_not_mapped_is_closed(file_key: str) -> None:
    before = descriptors()
    with SharedFile.open(file_key, FIELD) as file:
        assert len(descriptors()) == len(before) + 1
        file.check_size(PAGE)
    assert descriptors() == before


def test_a_file_that_may_not_be_opened_is_refused_with_the_reason(
    file_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(RegionRefusedError, match="the server cannot open it: Permission denied"):
        SharedFile.open(file_key, FIELD)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", [(os, "open"), (mmap, "mmap")], ids=["open", "map"])
def test_a_lack_of_descriptors_is_the_machines_fault_and_not_the_files(
    file_key: str, monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str], number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*what, failing(number))
        with pytest.raises(NoDescriptorsError, match="a shared-memory region takes two file descriptors"):
            SystemSegment.open(file_key, PAGE, FIELD)


@pytest.mark.usefixtures("zero")
def test_a_file_whose_descriptor_is_0_is_closed(file_key: str) -> None:
    with SharedFile.open(file_key, FIELD):
        assert "0" in descriptors()
    assert "0" not in descriptors()


def test_closing_a_file_that_was_detached_leaves_the_descriptor_to_its_new_owner(file_key: str) -> None:
    with SharedFile.open(file_key, FIELD) as file:
        descriptor = file.detach()
    assert str(descriptor.fileno()) in descriptors()
    descriptor.close()


def test_a_file_that_cannot_be_mapped_is_closed(file_key: str) -> None:
    os.truncate(SHM / file_key, 2**62)
    before = descriptors()
    with pytest.raises(RegionRefusedError, match="Cannot allocate memory"):
        SystemSegment.open(file_key, PAGE, FIELD)
    assert descriptors() == before


@pytest.mark.parametrize("what", ["fchmod", "fchown", "posix_fallocate"])
def test_a_segment_that_cannot_be_made_keeps_nothing_open(key: str, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, what, failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            SystemSegment.create(key, PAGE, access=Access(group_id=os.getgid()))
    assert descriptors() == before


def test_an_interrupt_while_space_is_taken_stays_one_and_keeps_nothing_open(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            SystemSegment.create(key, PAGE)
    assert descriptors() == before


def test_a_segment_whose_preparation_fails_is_gone_while_its_error_lives(key: str) -> None:
    """An error keeps the frames that it came through, and with them what is collected later."""
    before = descriptors()

    def prepare(_: MappedSegment) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        SystemSegment.create(key, PAGE, prepare=prepare)
    mapping = 1  # which lives as long as the frames do
    assert len(descriptors()) <= len(before) + mapping
    del caught
    assert descriptors() == before


def test_a_segment_whose_maker_is_interrupted_when_it_has_its_name_loses_it_while_the_interrupt_lives(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_name = segment_module._give_name

    def give_and_interrupt(fd: int, key: str) -> None:
        give_name(fd, key)
        assert (SHM / key).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(segment_module, "_give_name", give_and_interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        SystemSegment.create(key, PAGE)
    assert not (SHM / key).exists()
    del caught


def test_a_segment_has_two_descriptors_of_which_none_is_left_when_it_is_closed(key: str) -> None:
    before = descriptors()
    segment = SystemSegment.create(key, PAGE)
    assert len(descriptors()) == len(before) + 2
    segment.close()
    assert descriptors() == before


def test_a_forked_childs_copy_of_a_segment_is_closed_and_keeps_its_name(key: str) -> None:
    segment = SystemSegment.create(key, PAGE)
    segment.forsake()
    assert segment.is_closed
    assert (SHM / key).exists()


def test_a_closed_segment_has_no_descriptor(key: str) -> None:
    segment = SystemSegment.create(key, PAGE)
    segment.close()
    with pytest.raises(ClosedError, match="this shared-memory segment"):
        segment.fileno()


def test_another_process_than_the_maker_takes_no_name_away(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SystemSegment.create(key, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        segment.unlink()
    assert (SHM / key).exists()
    segment.unlink()
    assert not (SHM / key).exists()


def test_a_segment_of_somebody_else_that_is_lost_is_closed_and_keeps_its_name(file_key: str) -> None:
    before = descriptors()
    segment = SystemSegment.open(file_key, PAGE, FIELD)
    assert not segment.is_unlinked
    del segment
    assert descriptors() == before
    assert (SHM / file_key).exists()


def test_a_segment_of_ones_own_that_is_lost_has_no_name_any_more(key: str) -> None:
    before = descriptors()
    segment = SystemSegment.create(key, PAGE)
    assert not segment.is_unlinked
    del segment
    assert descriptors() == before
    assert not (SHM / key).exists()


# Leases


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lease")
    yield fd
    os.close(fd)


def test_a_shared_lease_that_the_kernel_cannot_give_keeps_no_descriptor(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", failing(errno.ENOLCK))
        with pytest.raises(OSError, match="No locks available"):
            SharedLease.take(fd, 1)
    assert descriptors() == before


def test_an_interrupt_before_a_shared_lease_is_taken_leaves_no_descriptor(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            SharedLease.take(fd, 1)
    assert descriptors() == before


def test_a_shared_lease_that_is_lost_stays_held(fd: int) -> None:
    """What it protects may still be mapped. Its descriptor stays open until this process, or here the test, ends."""
    before = descriptors()
    use(fd)
    (lost,) = descriptors() - before
    assert has_users(fd)
    os.close(int(lost))
    assert not has_users(fd)


def test_a_shared_lease_whose_descriptor_is_0_is_given_back(fd: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("zero")  # behind the other, which would take it
    before = descriptors()
    lease = use(fd)
    assert "0" in descriptors()
    lease.give_back()
    assert descriptors() == before


@pytest.mark.parametrize("take", [SlotLease.take, SlotLease.take_back], ids=["take", "take_back"])
def test_a_slots_lease_that_the_kernel_cannot_give_is_free_afterwards(
    fd: int, monkeypatch: pytest.MonkeyPatch, take: Callable[[SlotLease], bool]
) -> None:
    lease = SlotLease(fd, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", failing(errno.ENOLCK))
        with pytest.raises(OSError, match="No locks available"):
            take(lease)
    assert not lease.is_taken_here
    assert take(lease)


@pytest.mark.parametrize("take", [SlotLease.take, SlotLease.take_back], ids=["take", "take_back"])
def test_a_slots_lease_that_an_interrupt_keeps_from_being_taken_is_free_afterwards(
    fd: int, monkeypatch: pytest.MonkeyPatch, take: Callable[[SlotLease], bool]
) -> None:
    lease = SlotLease(fd, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(lease)
    assert take(lease)


def test_a_mapping_that_fails_for_lack_of_memory_says_so_and_is_the_owners_fault(
    file_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "mmap", failing(errno.ENOMEM))
    with pytest.raises(RegionRefusedError, match=f"cannot map its {PAGE} bytes: Cannot allocate memory"):
        SystemSegment.open(file_key, PAGE, FIELD)
