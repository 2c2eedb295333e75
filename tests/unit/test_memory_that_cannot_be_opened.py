"""A /dev/shm that is not there, read-only or full, and no descriptors left: another path, or an error of ours."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import pytest

from shm_backend_utils.cli.common.registered_regions import _take_memory
from shm_backend_utils.client import CopyWarning, PoolOptions, ShmClient
from shm_backend_utils.client.transports.grpc.transport import GrpcAddress
from shm_backend_utils.client.transports.transport import is_this_machine
from shm_backend_utils.compat.shm_regions import SystemShmHandle
from shm_backend_utils.errors import MachineError, NoSharedMemoryError, RegionGoneError, RegionRefusedError, ShmError
from shm_backend_utils.memory import locks, reaper
from shm_backend_utils.memory import segment as segments
from shm_backend_utils.memory.descriptors import NoDescriptorsError
from shm_backend_utils.memory.handover.server import HandoverRegistry
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.memory.segment import SystemSegment
from shm_backend_utils.memory.shared_file import DEV_SHM, free_bytes, total_bytes
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.opened import open_region
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)
FIELD: Final = "regions[0]"
each_number = pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])


class Place(NamedTuple):
    """A system call that fails: the first ones of its kind go well."""

    module: ModuleType
    name: str
    after: int = 0


class Failing:
    """Lets a place fail, with an error's number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.has_failed = False

    @contextlib.contextmanager
    def at(self, place: Place, number: int) -> Iterator[None]:
        real, left = getattr(place.module, place.name), [None] * place.after

        def call(*arguments: Any, **named: Any) -> Any:
            if left:
                left.pop()
                return real(*arguments, **named)
            self.has_failed = True
            raise OSError(number, os.strerror(number))

        with self._monkeypatch.context() as patch:
            patch.setattr(place.module, place.name, call)
            yield


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    monkeypatch.setattr(segments, "REGISTRY", HandoverRegistry())  # which has no server yet
    return Failing(monkeypatch)


MAKING: Final = {
    "a file": (RegionKind.SYSTEM, Place(os, "open")),
    "the file's owner": (RegionKind.SYSTEM, Place(os, "fchmod")),
    "its space": (RegionKind.SYSTEM, Place(os, "posix_fallocate")),
    "its description": (RegionKind.SYSTEM, Place(os, "open", 1)),
    "its folder": (RegionKind.SYSTEM, Place(os, "open", 2)),
    "its name": (RegionKind.SYSTEM, Place(os, "link")),
    "a memfd": (RegionKind.SEALED, Place(os, "memfd_create")),
    "a memfd's space": (RegionKind.SEALED, Place(os, "posix_fallocate")),
    "a memfd's description": (RegionKind.SEALED, Place(os, "open")),
    "a socket's waker": (RegionKind.SEALED, Place(os, "eventfd")),
    "a socket": (RegionKind.SEALED, Place(socket, "socket")),
}


@each_number
@pytest.mark.parametrize(("kind", "at"), MAKING.values(), ids=MAKING)
def test_what_cannot_be_made_is_the_machines_fault(failing: Failing, kind: RegionKind, at: Place, number: int) -> None:
    with failing.at(at, number), pytest.raises(NoSharedMemoryError) as raised:
        ManagedRegion.create(1, kind=kind)
    assert failing.has_failed
    assert isinstance(raised.value, NoDescriptorsError) is (number == errno.EMFILE)
    if number != errno.ENOSPC:
        assert ("has none left" if number == errno.EMFILE else os.strerror(number)) in str(raised.value)
    region = ManagedRegion.create(1, kind=kind)
    region.segment.unlink()
    region.close()


OPENING: Final = {
    "a file": (RegionKind.SYSTEM, Place(os, "open")),
    "its mapping": (RegionKind.SYSTEM, Place(sys.modules["mmap"], "mmap")),
    "a socket": (RegionKind.SEALED, Place(socket, "socket")),
    "a memfd once more": (RegionKind.SEALED, Place(os, "open", 1)),  # the first is its client's
    "its mapping, sealed": (RegionKind.SEALED, Place(sys.modules["mmap"], "mmap")),
}


@each_number
@pytest.mark.parametrize(("kind", "at"), OPENING.values(), ids=OPENING)
def test_what_cannot_be_opened_is_refused_or_told(failing: Failing, kind: RegionKind, at: Place, number: int) -> None:
    region = ManagedRegion.create(1, kind=kind)
    named = region.segment.key, region.header.token.hex(), FIELD
    try:
        with failing.at(at, number), pytest.raises((MachineError, RegionRefusedError, RegionGoneError)) as raised:
            open_region(*named)
        assert failing.has_failed
        assert isinstance(raised.value, NoDescriptorsError) is (number == errno.EMFILE)
        open_region(*named).close()
    finally:
        region.segment.unlink()
        region.close()


def find_host(_: SystemSegment) -> None:
    assert not is_this_machine("localhost"), "nobody says that it is one"
    raise RegionGoneError("what the name means, the first request will tell")


OTHERS: Final[dict[str, tuple[Callable[[SystemSegment], object], Place]]] = {
    "look": (lambda segment: segment.check(PAGE_SIZE, FIELD), Place(os, "lstat")),
    "lease": (lambda segment: locks.use(segment.fileno()), Place(os, "open")),
    "Triton's own": (lambda segment: _take_memory(segment.key, PAGE_SIZE), Place(os, "open")),
    "a user's": (lambda _: SystemShmHandle("mine", 1), Place(os, "open")),
    "gRPC": (lambda _: GrpcAddress("localhost:1", "localhost").channel(grpc), Place(select, "epoll")),
    "a host's address": (find_host, Place(socket, "getaddrinfo")),
    "a host's socket": (find_host, Place(socket, "socket")),
}


@pytest.fixture
def segment() -> Iterator[SystemSegment]:
    segment = SystemSegment.create(f"shmbu-{os.getpid()}-{0:016x}", PAGE_SIZE)
    yield segment
    segment.unlink()
    segment.close()


@each_number
@pytest.mark.parametrize(("work", "at"), OTHERS.values(), ids=OTHERS)
def test_whatever_opens_something_raises_errors_of_ours(
    failing: Failing, segment: SystemSegment, work: Callable[[SystemSegment], object], at: Place, number: int
) -> None:
    with failing.at(at, number), pytest.raises(ShmError):
        work(segment)
    assert failing.has_failed


@each_number
def test_what_cannot_be_removed_is_left_to_the_reaper(failing: Failing, segment: SystemSegment, number: int) -> None:
    region = ManagedRegion.create(1)
    with failing.at(Place(os, "unlink"), number):
        region.segment.unlink()
        region.close()
        reaper.reap()
    for name in ("scandir", "open"):
        with failing.at(Place(os, name), number):
            assert reaper.reap() == []
    reaper.reap()
    assert not (DEV_SHM / region.segment.key).exists()
    with failing.at(Place(os, "statvfs"), number):
        assert (free_bytes(), total_bytes(), PoolOptions(region="system").budget_bytes(0)) == (0, 0, 0)


PLACES: Final = {
    **{name: at for name, (_, at) in MAKING.items()},
    "a host's address": Place(socket, "getaddrinfo"),
    "its size": Place(os, "statvfs"),
    "what is in it": Place(os, "scandir"),
}


@each_number
@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("region", ["auto", "system"])
def test_a_client_takes_another_path_or_says_why(failing: Failing, region: RegionName, at: Place, number: int) -> None:
    def infer(client: ShmClient, path: Any) -> str:
        with client.infer("m", {"IN0": X}, path=path) as result:
            np.testing.assert_array_equal(result["OUT0"], 2 * X)
            return result.path

    with FakeServer(config("m")) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", CopyWarning)
        with failing.at(at, number), client_of(server, pool=PoolOptions(region=region), inline_bytes=0) as client:
            infer(client, "auto")
            assert infer(client, "inline") == "inline"
            for path in ("direct", "triton-shm"):
                with contextlib.suppress(ShmError):
                    infer(client, path)
        with client_of(server, pool=PoolOptions(region=region), inline_bytes=0) as client:
            assert infer(client, "auto") == "direct"
