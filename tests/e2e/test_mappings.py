"""What a model's process keeps of its clients' memory in /dev/shm: as long as it is needed, and no longer.

Of sealed memory, tests/e2e/test_sealed_mappings.py says the same.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc

from scripts.tools.processes import children, mappings, open_files
from shm_backend_utils.client import InferenceError, PoolOptions, ShmClient
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory import reaper
from shm_backend_utils.server import EmbeddedServer

SHM = Path("/dev/shm")
DEADLINE_S = 60.0
IN_DEV_SHM = PoolOptions(region="system")
LIMIT = 65536  # SHM_MAX_MAPPED_BYTES of the model mapping_limit

CLIENT = """
import sys
import numpy as np
from shm_backend_utils.client import PoolOptions, ShmClient
client = ShmClient(sys.argv[1], pool=PoolOptions(region="system"))
result = client.infer("direct_only", {"X": np.arange(4, dtype=np.float32)}, outputs={"Y": 16})
print(result["Y"].sum(), flush=True)
sys.stdin.read()
"""


def held(server: EmbeddedServer, pid: int) -> set[str]:
    """Return what a process' regions are held as, in the models' processes: mappings and open descriptors."""
    found = set()
    mark = f"{SHM}/shmbu-{pid}-"
    for stub in children(server.pid):
        found |= {f"mapping {line.split(maxsplit=5)[-1]} in {stub}" for line in mappings(stub) if mark in line}
        found |= {f"descriptor {target} in {stub}" for target in open_files(stub) if target.startswith(mark)}
    return found


def eventually(look: Callable[[], bool]) -> bool:
    """Return whether it becomes true without any request: a model looks after its mappings by itself."""
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def regions_of(pid: int) -> list[Path]:
    return list(SHM.glob(f"shmbu-{pid}-*"))


@pytest.fixture
def shm_client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    with ShmClient(triton_server.grpc_url, timeout_s=30, pool=IN_DEV_SHM) as client:
        yield client


@pytest.fixture
def nothing_held(triton_server: EmbeddedServer) -> None:
    """Tests before this one have closed their clients; their regions are still on their way out."""
    assert eventually(lambda: not held(triton_server, os.getpid()))


@pytest.mark.usefixtures("nothing_held")
def test_a_region_is_mapped_once_however_often_it_is_used(triton_server: EmbeddedServer, shm_client: ShmClient) -> None:
    with shm_client.prepare("direct_only", {"X": ((4,), np.float32)}, outputs={"Y": 16}) as call:
        for _ in range(10):
            call.infer()
        kinds = sorted(what.split()[0] for what in held(triton_server, os.getpid()))
    assert kinds == ["descriptor", "mapping"]


@pytest.mark.usefixtures("nothing_held")
def test_a_model_lets_go_of_what_its_client_closed(triton_server: EmbeddedServer, shm_client: ShmClient) -> None:
    shm_client.infer("direct_only", {"X": np.zeros(4, np.float32)}, outputs={"Y": 16}).release()
    assert held(triton_server, os.getpid())
    shm_client.close()
    assert eventually(lambda: not held(triton_server, os.getpid()))


def test_a_model_lets_go_of_what_a_killed_client_left(triton_server: EmbeddedServer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, triton_server.grpc_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "6.0\n"
        assert held(triton_server, client.pid)
        client.send_signal(signal.SIGKILL)
        client.wait()
    assert eventually(lambda: not held(triton_server, client.pid))
    reaper.reap()
    assert regions_of(client.pid) == []


def test_a_model_keeps_what_its_living_client_may_use_again(triton_server: EmbeddedServer) -> None:
    """Two sweeps go by: another region, which is closed, shows when."""
    with (
        ShmClient(triton_server.grpc_url, pool=IN_DEV_SHM) as kept,
        kept.prepare("direct_only", {"X": ((4,), np.float32)}, outputs={"Y": 16}) as call,
    ):
        call.infer()
        before = held(triton_server, os.getpid())
        for _ in range(2):
            with ShmClient(triton_server.grpc_url, pool=IN_DEV_SHM) as other:
                other.infer("direct_only", {"X": np.zeros(4, np.float32)}, outputs={"Y": 16}).release()
            assert eventually(lambda: held(triton_server, os.getpid()) <= before)
        assert len(held(triton_server, os.getpid())) == 2


def test_a_client_sweeps_up_after_one_that_was_killed(triton_server: EmbeddedServer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, triton_server.grpc_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        client.stdout.readline()
        assert len(regions_of(client.pid)) == 1
        client.send_signal(signal.SIGKILL)
        client.wait()
    with ShmClient(triton_server.grpc_url):
        assert regions_of(client.pid) == []


def test_a_model_lets_go_of_a_region_that_was_unregistered(triton_server: EmbeddedServer) -> None:
    path = SHM / f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    path.write_bytes(bytes(4096))
    grpc = tritonclient.grpc.InferenceServerClient(triton_server.grpc_url)
    try:
        grpc.register_system_shared_memory("to be forgotten", path.name, 4096)
        send_named(grpc, "direct_only", ["to be forgotten"])
        assert is_mapped_by_a_stub(triton_server, path)
        grpc.unregister_system_shared_memory("to be forgotten")
        assert eventually(lambda: not is_mapped_by_a_stub(triton_server, path))
    finally:
        path.unlink()
        grpc.close()


def test_a_region_that_was_truncated_is_refused_and_the_model_lives_on(
    triton_server: EmbeddedServer, shm_client: ShmClient
) -> None:
    before = children(triton_server.pid)
    x = np.ones(4096, np.float32)
    with shm_client.prepare("direct_only", {"X": (x.shape, x.dtype)}, outputs={"Y": x.nbytes}) as call:
        call.infer()
        (path,) = regions_of(os.getpid())
        os.truncate(path, 8192)  # the header and the record, which the client itself needs, stay
        with pytest.raises(InferenceError, match="shm:refused: .* its \\d+ bytes are not there any more"):
            call.infer()
    assert not path.exists()  # the client does not use it again
    assert children(triton_server.pid) == before


def test_a_model_maps_no_more_than_its_limit(triton_server: EmbeddedServer, shm_client: ShmClient) -> None:
    calls = [shm_client.prepare("mapping_limit", {"X": ((2048,), np.float32)}, outputs={"Y": 8192}) for _ in range(10)]
    for number, call in enumerate(calls * 2):
        call.inputs["X"][:] = number
        with call.infer() as result:
            assert (result["Y"] == number).all()
        assert 0 < mapped_bytes(triton_server, [path.name for path in regions_of(os.getpid())]) <= LIMIT
    for call in calls:
        call.close()


def test_a_region_beyond_the_limit_is_refused(shm_client: ShmClient) -> None:
    with pytest.raises(
        InferenceError, match="SHM_MAX_MAPPED_BYTES\\) is 65536; who runs the model may raise it"
    ) as refusal:
        shm_client.infer("mapping_limit", {"X": np.zeros(LIMIT // 4, np.float32)})
    assert refusal.value.status() == "StatusCode.UNAVAILABLE"


def test_regions_of_one_request_that_are_beyond_the_limit_together_are_refused(triton_server: EmbeddedServer) -> None:
    paths = [SHM / f"foreign-{os.getpid()}-{secrets.token_hex(8)}" for _ in range(2)]
    grpc = tritonclient.grpc.InferenceServerClient(triton_server.grpc_url)
    try:
        for path in paths:
            path.write_bytes(bytes(LIMIT // 2 + 4096))
            grpc.register_system_shared_memory(path.name, path.name, LIMIT // 2 + 4096)
        with pytest.raises(tritonclient.grpc.InferenceServerException, match="SHM_MAX_MAPPED_BYTES") as refusal:
            send_named(grpc, "mapping_limit", [path.name for path in paths])
        assert refusal.value.status() == "StatusCode.UNAVAILABLE"
    finally:
        for path in paths:  # before anything that a server which died cannot do
            path.unlink(missing_ok=True)
        for path in paths:
            grpc.unregister_system_shared_memory(path.name)
        grpc.close()


def test_a_model_with_a_response_cache_does_not_load(tmp_path: Path) -> None:
    version = tmp_path / "models" / "cached" / "1"
    version.mkdir(parents=True)
    models = Path(__file__).resolve().parents[1] / "models"
    (version / "model.py").write_text((models / "direct_only" / "1" / "model.py").read_text())
    config = (models / "direct_only" / "config.pbtxt").read_text()
    (version.parent / "config.pbtxt").write_text(f"{config}\nresponse_cache {{ enable: true }}\n")
    with pytest.raises(MachineError, match="model 'cached' enables response_cache, which looks at input tensors only"):
        EmbeddedServer.start(tmp_path / "models", log_file=tmp_path / "server.log")


def send_named(grpc: tritonclient.grpc.InferenceServerClient, model: str, names: list[str]) -> None:
    """Send a request with an input at the beginning of the first region and an output in the last one."""
    descriptor = {
        "v": 1,
        "model": model,
        "regions": [{"kind": "named", "name": name} for name in names],
        "inputs": {"X": [0, 0, 16, "FP32", [4]]},
        "outputs": {"Y": [len(names) - 1, 1024, 16]},
    }
    grpc.infer(model, [], parameters={"shm_io": json.dumps(descriptor)}, client_timeout=30)


def is_mapped_by_a_stub(server: EmbeddedServer, path: Path) -> bool:
    return mapped_bytes(server, [path.name]) > 0


def mapped_bytes(server: EmbeddedServer, names: list[str]) -> int:
    """Return how much of these objects the models' processes have mapped."""
    total = 0
    for stub in children(server.pid):
        for line in mappings(stub):
            fields = line.split(maxsplit=5)
            if any(fields[-1].startswith(f"{SHM}/{name}") for name in names):
                begin, _, end = fields[0].partition("-")
                total += int(end, 16) - int(begin, 16)
    return total
