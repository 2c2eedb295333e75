"""What a model keeps of its clients' memory, sealed or not, and how long; no hole in it, and no size, kills a model."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.processes import children
from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.memory.handover.server import REGISTRY
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.memory.segment import MappedSegment
from shm_backend_utils.protocol.handover import parse_sealed_key
from shm_backend_utils.server import EmbeddedServer
from tests.unit.forks.programs import run_program

from ..crash.gate import Gate
from ..crash.processes import held_regions, regions_of, stub_of
from .eventually import eventually
from .own_regions import own_regions

X = np.arange(4, dtype=np.float32)
ROOM = {"Y": X.nbytes}


def stub(server: EmbeddedServer, model: str) -> int:
    pid = stub_of(server, model)
    assert pid is not None
    return pid


@pytest.mark.every_region
def test_a_model_keeps_what_is_open(triton_server: EmbeddedServer, grpc_client: ShmClient, region: RegionName) -> None:
    earlier = regions_of(os.getpid())
    grpc_client.infer("direct_only", {"X": X}, outputs=ROOM).release()
    kept = regions_of(os.getpid()) - earlier
    with ShmClient(triton_server.grpc_url, pool=PoolOptions(region=region)) as other:
        other.infer("direct_only", {"X": X}, outputs=ROOM).release()
        closed = regions_of(os.getpid()) - kept - earlier
    pid = stub(triton_server, "direct_only")
    before = held_regions(pid, kept)
    assert before
    eventually(lambda: not held_regions(pid, closed))
    assert held_regions(pid, kept) == before


@pytest.mark.parametrize("region", ["system"])  # sealed ones cannot be
def test_a_truncated_region_is_refused_by_a_living_model(triton_server: EmbeddedServer, grpc_client: ShmClient) -> None:
    before = children(triton_server.pid)
    x = np.ones(4096, np.float32)
    with grpc_client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.infer()
        (path,) = Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")
        os.truncate(path, 8192)  # the header and the record, which the client itself needs, stay
        with pytest.raises(InferenceError, match="shm:refused: .* its \\d+ bytes are not there any more"):
            call.infer()
    eventually(lambda: not path.exists())  # the client does not use it again
    assert children(triton_server.pid) == before


FORKS = """
import numpy as np
from shm_backend_utils.client import PoolOptions, ShmClient

X = np.arange(1000, dtype=np.float32)
POOL = PoolOptions(region="sealed")

def check(client, n=1000):
    with client.infer("identity", {"INPUT0": X[:n]}, path="direct") as result:
        assert (result["OUTPUT0"] == X[:n]).all()

def work():
    with ShmClient(URL, pool=POOL, timeout_s=30) as own:
        check(own)
        check(own, 10)

client = ShmClient(URL, pool=POOL, timeout_s=30)
if BEFORE:
    check(client)
for _ in range(3):
    in_child(work)
    check(client)
    big = np.zeros(1 << 20, np.float32)  # of a new region, which is fetched anew
    client.infer("identity", {"INPUT0": big}, path="direct").release()
with ShmClient(URL, pool=POOL) as other:
    check(other)
client.close()
"""


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(triton_server.grpc_url, timeout_s=30, inline_bytes=0, pool=PoolOptions(region="sealed")) as client:
        yield client


def test_a_client_closed_in_flight_leaves_the_model_whole(triton_server: EmbeddedServer, tmp_path: Path) -> None:
    """The model has it mapped until it has answered; nobody gets it any more."""
    pid, gate = stub(triton_server, "crash_stages"), Gate(tmp_path)
    gate.close()
    client = ShmClient(triton_server.grpc_url, timeout_s=30, pool=PoolOptions(region="sealed"), inline_bytes=0)
    parameters = gate.parameters("half written")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(client.infer, "crash_stages", {"X": X}, outputs=ROOM, parameters=parameters)
        gate.wait_for_model()
        regions = regions_of(os.getpid())
        for region in own_regions():
            key = parse_sealed_key(region.key)
            assert key is not None
            REGISTRY.withdraw(key.number)
        assert {*held_regions(pid, regions)} == regions
        client.close()
        gate.let_go()
        answer.exception()  # an answer or an error: its connection was closed
    del answer, region
    eventually(lambda: not held_regions(pid, regions))
    assert stub(triton_server, "crash_stages") == pid
    with ShmClient(triton_server.grpc_url, timeout_s=30, inline_bytes=0) as other:
        assert other.infer("crash_stages", {"X": X}, outputs=ROOM)["Y"].tolist() == (X + 1).tolist()


@pytest.mark.parametrize(("ending", "before"), [("os._exit", True), ("sys.exit", False)])
def test_a_child_has_a_client_beside_the_parents(triton_server: EmbeddedServer, ending: str, before: bool) -> None:
    run_program(ending, f"URL = {triton_server.grpc_url!r}\nBEFORE = {before}", FORKS)


KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def the_region() -> MappedSegment:
    (region,) = own_regions()
    return region


def punch(fd: int, offset: int, byte_size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_int(KEEP_SIZE_AND_PUNCH_HOLE), ctypes.c_long(offset), ctypes.c_long(byte_size)
    if libc.fallocate(ctypes.c_int(fd), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def link_to(region: MappedSegment, pid: int) -> Path:
    """Return the path by which anybody who may can open what a model has open of a region."""
    inode = os.fstat(region.fileno()).st_ino
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()]
    return next(link for link in links if link.stat().st_ino == inode)


def test_neither_half_changes_its_size(triton_server: EmbeddedServer, client: ShmClient) -> None:
    x = np.ones(4096, np.float32)
    with client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.inputs["X"][:] = x
        call.infer().release()
        region = the_region()
        models = os.open(link_to(region, stub(triton_server, "direct_only")), os.O_RDWR)
        try:
            for descriptor, byte_size in itertools.product((region.fileno(), models), (0, 1 << 30)):
                with pytest.raises(PermissionError) as refusal:
                    os.ftruncate(descriptor, byte_size)
                assert refusal.value.errno == errno.EPERM
        finally:
            os.close(models)
        with call.infer() as result:
            np.testing.assert_array_equal(result["Y"], x)


@pytest.mark.parametrize("begin", [8192, 0], ids=["data", "everything"])
def test_holes_between_requests_are_refused(triton_server: EmbeddedServer, client: ShmClient, begin: int) -> None:
    pid = stub(triton_server, "direct_only")
    x = np.ones(4096, np.float32)
    with client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.infer().release()
        region = the_region()
        punch(region.fileno(), begin, region.byte_size - begin)
        with pytest.raises((MemoryRefusedError, InferenceError), match="shm:(refused|stale|gone|table)"):
            call.infer()
    del region
    with client.infer("direct_only", {"X": x}, outputs={"Y": x.nbytes}) as result:
        np.testing.assert_array_equal(result["Y"], x)
    assert stub(triton_server, "direct_only") == pid
