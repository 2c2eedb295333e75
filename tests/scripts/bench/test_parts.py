"""The bench's parts: what it sends, how it counts, and Triton's own shared memory, of which nothing stays behind."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from scripts.tools.bench.bench import FULL
from scripts.tools.bench.groups.own_time import functions_called
from scripts.tools.bench.machine import resident_bytes, sealed_bytes, shared_bytes
from scripts.tools.bench.payloads import endless, uploads_of, varying
from scripts.tools.bench.random_requests import RandomRequests
from scripts.tools.bench.rates import rate_of_threads, rate_ratio
from scripts.tools.bench.ways import RegisteredPair
from shm_backend_utils.cli.common import registered_regions
from shm_backend_utils.client import Result
from shm_backend_utils.dtypes import from_numpy
from shm_backend_utils.errors import NoSharedMemoryError
from shm_backend_utils.memory.kinds import RegionKind
from shm_backend_utils.memory.managed import ManagedRegion


def test_fewer_rounds_are_fewer_slow_rounds() -> None:
    amounts = FULL.with_rounds(20).with_requests(7)
    assert (amounts.rounds, amounts.slow_rounds, amounts.requests) == (20, 2, 7)
    assert FULL.with_rounds(3).slow_rounds == 1


def test_arrays_that_vary_have_lengths_around_the_one_that_was_asked_for() -> None:
    arrays = varying(4096)
    lengths = [array.nbytes for array in arrays]
    assert (min(lengths), max(lengths)) == (2048, 6144)
    assert abs(np.mean(lengths) - 4096) < 64
    assert len(set(lengths)) > 200
    given = endless(arrays, first=len(arrays) - 1)
    assert [next(given).nbytes for _ in range(2)] == [lengths[-1], lengths[0]]


def test_no_two_uploads_have_the_same_shape_and_each_has_the_sums_of_its_rows() -> None:
    uploads = uploads_of(50_000)
    sizes = [upload.x.nbytes for upload in uploads]
    assert len({upload.x.shape for upload in uploads}) == len(uploads) > 200
    assert 25_000 * 0.98 < min(sizes) < max(sizes) <= 75_000
    assert abs(np.mean(sizes) - 50_000) < 1_000
    for upload in uploads[:10]:
        assert upload.sums.tolist() == upload.x.astype(np.int64).sum(axis=1).tolist()


def test_a_rate_is_of_all_threads_each_beginning_elsewhere() -> None:
    together = threading.Barrier(3)
    firsts: list[int] = []

    def call(x: int) -> None:
        if len(firsts) < 3:
            firsts.append(x)
            together.wait(5)

    with ThreadPoolExecutor(3) as pool:
        assert rate_of_threads(pool, call, list(range(100)), threads=3, seconds=0.5) > 3
    assert len(set(firsts)) == 3


def test_a_call_that_fails_ends_the_measurement() -> None:
    def call(x: int) -> None:
        raise AssertionError("a wrong answer")

    with ThreadPoolExecutor(2) as pool, pytest.raises(AssertionError, match="a wrong answer"):
        rate_of_threads(pool, call, [1], threads=2, seconds=60)  # not waited for


def test_rates_are_compared_period_by_period() -> None:
    figure = rate_ratio("calls", {"ours": [10.0, 40.0, 30.0], "stock": [10.0, 20.0, 10.0]}, "× others", at_least=1.5)
    assert (figure.figure, figure.basis, figure.is_held) == (2.0, "30 /s / 10 /s", True)


def test_functions_of_the_package_are_counted_once_and_no_others() -> None:
    def work() -> None:
        for _ in range(2):
            from_numpy(np.dtype(np.float32), "x")
            json.dumps([1])

    assert "dtypes:from_numpy" in functions_called(work)
    assert functions_called(lambda: json.dumps([1])) == []


def test_memory_is_counted_as_it_grows() -> None:
    own, resident = "bench-test-", resident_bytes(os.getpid())
    path = Path(f"/dev/shm/{own}{os.getpid()}")
    before = shared_bytes(own)
    try:
        path.write_bytes(bytes(1 << 16))
        assert shared_bytes(own) - before == 1 << 16
    finally:
        path.unlink()
    with mmap.mmap(
        -1, 1 << 22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:  # the allocator might give what was resident before
        held.write(bytes(1 << 22))
        assert resident_bytes(os.getpid()) - resident > 1 << 21


class Forgetful:
    """A client whose model adds nothing."""

    def infer(self, model: str, inputs: dict[str, Any], **named: Any) -> Result:
        return Result({f"Y{name[1:]}": array for name, array in inputs.items()}, "direct", lambda: None)


def test_sealed_memory_is_counted_as_it_is_mapped() -> None:
    before = sealed_bytes(os.getpid())
    region = ManagedRegion.create(100, kind=RegionKind.SEALED)
    assert sealed_bytes(os.getpid()) - before == region.header.byte_size
    region.close()


def test_wrong_answers_to_requests_at_random_are_counted() -> None:
    requests = RandomRequests(Forgetful())  # type: ignore[arg-type]
    requests.send(50)
    assert requests.answers == 50
    assert requests.wrong > 20


# --- Triton's own shared memory


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
    with pytest.raises(NoSharedMemoryError, match="^/dev/shm has no room for 4,096 bytes"), ExitStack() as stack:
        RegisteredPair(stack, Server(), "grpc", 4096)
    assert left() == []
