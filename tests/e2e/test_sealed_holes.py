"""Sealed memory cannot be truncated; holes can be punched into it, which costs memory and kills nobody."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.server import EmbeddedServer

from ..crash.gate import Gate
from .own_regions import own_regions
from .sealed_stub import SealedStub, stub_of

KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
PAGE = 4096
BLOCK = 512
LENGTH = 4 << 20  # of FP32: 16 MiB
DATA = 2 * PAGE


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(triton_server.grpc_url, timeout_s=30, pool=PoolOptions(region="sealed")) as client:
        yield client


def the_region() -> MappedSegment:
    (region,) = own_regions()
    return region


def punch(fd: int, offset: int, byte_size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_int(KEEP_SIZE_AND_PUNCH_HOLE), ctypes.c_long(offset), ctypes.c_long(byte_size)
    if libc.fallocate(ctypes.c_int(fd), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def inode_of(region: MappedSegment) -> int:
    return os.fstat(region.fileno()).st_ino


def descriptor_in(stub: SealedStub, region: MappedSegment) -> str:
    """Return the path by which anybody who may can open what a model has open of a region."""
    found = []
    for number in os.listdir(f"/proc/{stub.pid}/fd"):  # noqa: PTH208
        path = f"/proc/{stub.pid}/fd/{number}"
        if os.path.exists(path) and os.stat(path).st_ino == inode_of(region):  # noqa: PTH110, PTH116
            found.append(path)
    return found[0]


@pytest.mark.parametrize("byte_size", [0, PAGE, 1 << 30])
def test_it_cannot_be_truncated_nor_grown_by_its_client_nor_by_the_model(
    triton_server: EmbeddedServer, client: ShmClient, byte_size: int
) -> None:
    x = np.ones(4096, np.float32)
    with client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.inputs["X"][:] = x
        call.infer().release()
        region = the_region()
        own = os.dup(region.fileno())
        models = os.open(descriptor_in(stub_of(triton_server, "direct_only"), region), os.O_RDWR)
        try:
            for descriptor in (own, models):
                with pytest.raises(PermissionError) as refusal:
                    os.ftruncate(descriptor, byte_size)
                assert refusal.value.errno == errno.EPERM
        finally:
            os.close(own)
            os.close(models)
        with call.infer() as result:
            np.testing.assert_array_equal(result["Y"], x)


@pytest.mark.parametrize("where", ["data", "everything"])
def test_holes_between_requests_are_refused(triton_server: EmbeddedServer, client: ShmClient, where: str) -> None:
    stub = stub_of(triton_server, "direct_only")
    x = np.ones(4096, np.float32)
    with client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.infer().release()
        region = the_region()
        begin = {"data": DATA, "everything": 0}[where]
        punch(region.fileno(), begin, region.byte_size - begin)
        with pytest.raises((MemoryRefusedError, InferenceError), match="shm:(refused|stale|gone|table)"):
            call.infer()
    del region
    with client.infer("direct_only", {"X": x}, outputs={"Y": x.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], x)
    assert stub.is_alive
    assert stub_of(triton_server, "direct_only") == stub


def test_a_model_that_reads_while_holes_are_punched_reads_zeros_and_lives(
    triton_server: EmbeddedServer, client: ShmClient, tmp_path: Path
) -> None:
    """Each page that it touches is taken anew, from the machine or its container, and is the region's again."""
    stub, gate = stub_of(triton_server, "crash_stages"), Gate(tmp_path)
    half = LENGTH // 2
    parameters = gate.parameters("half written")
    with client.prepare("crash_stages", {"X": ((LENGTH,), np.float32)}, outputs=["Y"], parameters=parameters) as call:
        call.inputs["X"][:] = 5
        call.infer().release()  # it learns how large the output is
    with client.prepare(
        "crash_stages", {"X": ((LENGTH,), np.float32)}, outputs={"Y": 4 * LENGTH}, parameters=parameters
    ) as call:
        x = call.inputs["X"]
        x[:] = 5
        region = next(each for each in own_regions() if each.byte_size > 8 * LENGTH)
        begin = x.ctypes.data - np.frombuffer(region.buffer(), np.uint8).ctypes.data
        gate.close()
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(call.infer)
            gate.wait_for_model()
            whole, mapped = os.fstat(region.fileno()).st_blocks, stub.shared_bytes()
            punch(region.fileno(), begin + 2 * LENGTH, 2 * LENGTH)
            holed = os.fstat(region.fileno()).st_blocks
            gate.let_go()
            with answer.result() as result:
                y = result["Y"]
                assert (y[:half] == 6).all()
                assert (y[half:] == 1).all()
        assert (whole - holed) * BLOCK == 2 * LENGTH
        assert os.fstat(region.fileno()).st_blocks == whole
        assert stub.shared_bytes() - mapped >= 2 * LENGTH
        del x, y, region
    assert stub.is_alive
    assert stub_of(triton_server, "crash_stages") == stub
