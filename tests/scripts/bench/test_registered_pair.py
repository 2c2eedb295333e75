"""Triton's own shared memory in the bench: nothing stays behind, whatever the server and the machine do."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from scripts.tools.bench.ways import RegisteredPair
from shm_backend_utils.cli.common import registered_regions
from shm_backend_utils.errors import NoSharedMemoryError

IN_USE = "Cannot unregister shared memory region 'x', it is currently in use."


class Server:
    """What a server does with registrations; it may have them in use for some time."""

    def __init__(self, *failures: str) -> None:
        self.registered: set[str] = set()
        self._failures = list(failures)

    def register_system_shared_memory(self, name: str, key: str, byte_size: int) -> None:
        assert Path(f"/dev/shm{key}").stat().st_size == byte_size
        self.registered.add(name)

    def unregister_system_shared_memory(self, name: str) -> None:
        if self._failures:
            raise InferenceServerException(self._failures.pop())
        self.registered.remove(name)


def left() -> list[Path]:
    return list(Path("/dev/shm").glob(f"bench-{os.getpid()}-*"))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_is_filled_in_is_there_and_nothing_stays(protocol: str) -> None:
    server = Server()
    x = np.arange(3, dtype=np.float32)
    with ExitStack() as stack:
        pair = RegisteredPair(stack, server, protocol, 4096)
        pair.fill(x)
        source, target = sorted(left())
        assert source.read_bytes()[:12] == x.tobytes()
        assert server.registered == {source.name, target.name}
        target.write_bytes(x[::-1].tobytes())
        assert pair.received((3,)).tolist() == [2.0, 1.0, 0.0]
        assert pair.inputs[0].shape() == [3]
    assert (left(), server.registered) == ([], set())


def test_a_region_that_the_server_still_has_in_use_is_unregistered_after_that() -> None:
    server = Server(IN_USE, IN_USE)
    with ExitStack() as stack:
        RegisteredPair(stack, server, "grpc", 4096)
    assert (left(), server.registered) == ([], set())


@pytest.mark.parametrize("failures", [["no such server"], [IN_USE] * 100], ids=["of another kind", "forever in use"])
def test_another_failure_is_told_and_nothing_stays(failures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_regions, "_PATIENCE_S", 0.02)
    with pytest.raises(InferenceServerException, match=failures[0]), ExitStack() as stack:
        RegisteredPair(stack, Server(*failures), "grpc", 4096)
    assert left() == []


def test_no_room_is_told_in_a_line_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with (
        pytest.raises(NoSharedMemoryError, match="^/dev/shm has no room for 4,096 bytes"),
        ExitStack() as stack,
    ):
        RegisteredPair(stack, Server(), "grpc", 4096)
    assert left() == []
