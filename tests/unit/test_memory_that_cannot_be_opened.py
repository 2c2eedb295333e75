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
from typing import Any, Final

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
from shm_backend_utils.testing.faults.system_calls import CALLS, Failing, Fault
from tests.opened import open_region
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)
FIELD: Final = "regions[0]"
REFUSED: Final = (MachineError, RegionRefusedError, RegionGoneError)
each_number = pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EMFILE])


def failing(call: str, number: int, after: int = 0) -> Failing:
    """Have all calls of a kind but the first ones fail with an error's number."""
    return Failing(Fault(call, after, number, 2**30))


@pytest.fixture(autouse=True)
def _more_calls_that_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    of_modules = {os: "memfd_create eventfd lstat scandir statvfs", socket: "socket getaddrinfo", select: "epoll"}
    for module, names in of_modules.items():
        for name in names.split():
            monkeypatch.setitem(CALLS, name, (module, name))
    monkeypatch.setattr(segments, "REGISTRY", HandoverRegistry())  # which has no server yet


MAKING: Final = {
    "a file": (RegionKind.SYSTEM, "open", 0),
    "the file's owner": (RegionKind.SYSTEM, "fchmod", 0),
    "its space": (RegionKind.SYSTEM, "posix_fallocate", 0),
    "its description": (RegionKind.SYSTEM, "open", 1),
    "its folder": (RegionKind.SYSTEM, "open", 2),
    "its name": (RegionKind.SYSTEM, "link", 0),
    "a memfd": (RegionKind.SEALED, "memfd_create", 0),
    "a memfd's space": (RegionKind.SEALED, "posix_fallocate", 0),
    "a memfd's description": (RegionKind.SEALED, "open", 0),
    "a socket's waker": (RegionKind.SEALED, "eventfd", 0),
    "a socket": (RegionKind.SEALED, "socket", 0),
}


@each_number
@pytest.mark.parametrize(("kind", "call", "after"), MAKING.values(), ids=MAKING)
def test_what_cannot_be_made_is_the_machines_fault(kind: RegionKind, call: str, after: int, number: int) -> None:
    with failing(call, number, after) as fault, pytest.raises(NoSharedMemoryError) as raised:
        ManagedRegion.create(1, kind=kind)
    assert fault.has_happened
    assert isinstance(raised.value, NoDescriptorsError) is (number == errno.EMFILE)
    if number != errno.ENOSPC:
        assert ("has none left" if number == errno.EMFILE else os.strerror(number)) in str(raised.value)
    region = ManagedRegion.create(1, kind=kind)
    region.segment.unlink()
    region.close()


OPENING: Final = {
    "a file": (RegionKind.SYSTEM, "open", 0),
    "its mapping": (RegionKind.SYSTEM, "mmap", 0),
    "a socket": (RegionKind.SEALED, "socket", 0),
    "a memfd once more": (RegionKind.SEALED, "open", 1),  # the first is its client's
    "its mapping, sealed": (RegionKind.SEALED, "mmap", 0),
}


@each_number
@pytest.mark.parametrize(("kind", "call", "after"), OPENING.values(), ids=OPENING)
def test_what_cannot_be_opened_is_refused_or_told(kind: RegionKind, call: str, after: int, number: int) -> None:
    region = ManagedRegion.create(1, kind=kind)
    named = region.segment.key, region.header.token.hex(), FIELD
    try:
        with (
            failing(call, number, after) as fault,
            pytest.raises((MachineError, RegionRefusedError, RegionGoneError)) as raised,
        ):
            open_region(*named)
        assert fault.has_happened
        assert isinstance(raised.value, NoDescriptorsError) is (number == errno.EMFILE)
        open_region(*named).close()
    finally:
        region.segment.unlink()
        region.close()


def find_host(_: SystemSegment) -> None:
    assert not is_this_machine("localhost"), "nobody says that it is one"
    raise RegionGoneError("what the name means, the first request will tell")


OTHERS: Final[dict[str, tuple[Callable[[SystemSegment], object], str]]] = {
    "look": (lambda segment: segment.check(PAGE_SIZE, FIELD), "lstat"),
    "lease": (lambda segment: locks.use(segment.fileno()), "open"),
    "Triton's own": (lambda segment: _take_memory(segment.key, PAGE_SIZE), "open"),
    "a user's": (lambda _: SystemShmHandle("mine", 1), "open"),
    "gRPC": (lambda _: GrpcAddress("localhost:1", "localhost").channel(grpc), "epoll"),
    "a host's address": (find_host, "getaddrinfo"),
    "a host's socket": (find_host, "socket"),
}


@pytest.fixture
def segment() -> Iterator[SystemSegment]:
    segment = SystemSegment.create(f"shmbu-{os.getpid()}-{0:016x}", PAGE_SIZE)
    yield segment
    segment.unlink()
    segment.close()


@each_number
@pytest.mark.parametrize(("work", "call"), OTHERS.values(), ids=OTHERS)
def test_whatever_opens_something_raises_errors_of_ours(
    segment: SystemSegment, work: Callable[[SystemSegment], object], call: str, number: int
) -> None:
    with failing(call, number) as fault, pytest.raises(ShmError):
        work(segment)
    assert fault.has_happened


@each_number
def test_what_cannot_be_removed_is_left_to_the_reaper(segment: SystemSegment, number: int) -> None:
    region = ManagedRegion.create(1)
    with failing("unlink", number):
        region.segment.unlink()
        region.close()
        reaper.reap()
    for name in ("scandir", "open")[sys.version_info >= (3, 13) :]:  # whose glob keeps a scandir of its own
        with failing(name, number):
            assert reaper.reap() == []
    reaper.reap()
    assert not (DEV_SHM / region.segment.key).exists()
    with failing("statvfs", number):
        assert (free_bytes(), total_bytes(), PoolOptions(region="system").budget_bytes(0)) == (0, 0, 0)


PLACES: Final = {
    **{name: (call, after) for name, (_, call, after) in MAKING.items()},
    "a host's address": ("getaddrinfo", 0),
    "its size": ("statvfs", 0),
    "what is in it": ("scandir", 0),
}


@each_number
@pytest.mark.parametrize(("call", "after"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("region", ["auto", "system"])
def test_a_client_takes_another_path_or_says_why(region: RegionName, call: str, after: int, number: int) -> None:
    def infer(client: ShmClient, path: Any) -> str:
        with client.infer("m", {"IN0": X}, path=path) as result:
            np.testing.assert_array_equal(result["OUT0"], 2 * X)
            return result.path

    with FakeServer(config("m")) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", CopyWarning)
        with failing(call, number, after), client_of(server, pool=PoolOptions(region=region), inline_bytes=0) as client:
            infer(client, "auto")
            assert infer(client, "inline") == "inline"
            for path in ("direct", "triton-shm"):
                with contextlib.suppress(ShmError):
                    infer(client, path)
        with client_of(server, pool=PoolOptions(region=region), inline_bytes=0) as client:
            assert infer(client, "auto") == "direct"
