"""A model's process, or the server, is killed in the middle of a call, and the client's memory serves the next one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PoolOptions, ServerUnavailableError, ShmClient
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.layout import PAGE_SIZE, record_offset
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..e2e.eventually import eventually
from ..e2e.flavours import url_of
from ..e2e.own_regions import own_regions
from .gate import Gate
from .processes import held_regions, infer_until_answered, kill_stub, living_stub_of, regions_of, stub_of

X = np.arange(1000, dtype=np.float32)


def slots_in_use() -> list[bool]:
    """Return of each region of this process whether a model holds its slot's lease."""
    opened = [Descriptor(os.open, f"/proc/self/fd/{region.fileno()}", os.O_RDWR) for region in own_regions()]
    return [locks.is_slot_in_use(each.fileno(), record_offset(0, PAGE_SIZE)) for each in opened]


@pytest.mark.parametrize(
    ("stage", "protocol", "region"),
    [("not begun", "grpc", "sealed"), ("half written", "http", "system"), ("stamped", "grpc", "system")],
)
def test_the_client_is_told_and_its_memory_serves_the_next_model(
    stage: str, protocol: str, region: RegionName, mortal: MortalServer, gate: Gate
) -> None:
    url = url_of(mortal.server, protocol)
    client = ShmClient(url, timeout_s=60, pool=PoolOptions(region=region))
    call = client.prepare(
        "crash_stages", {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}, parameters=gate.parameters(stage)
    )
    call.inputs["X"][:] = X
    call.infer().release()  # the model has mapped the region, whatever it is killed at
    gate.close()
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(call.infer)
        gate.wait_for_model()
        assert slots_in_use() == [stage == "half written"]
        kill_stub(mortal.server, "crash_stages")
        with pytest.raises(InferenceError, match="is not healthy"):
            answer.result()
    assert slots_in_use() == [False], "a lease goes with its model"
    with ShmClient(url) as other, other.infer("identity", {"INPUT0": X}) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], X)
    assert mortal.server.is_running
    mortal.kill()
    mortal.come_back()
    call.inputs["X"][:] = 5 * X
    with infer_until_answered(call) as result:
        np.testing.assert_array_equal(result["Y"], 5 * X + 1)
    stub, regions = living_stub_of(mortal.server, "crash_stages"), regions_of(os.getpid())
    assert held_regions(stub, regions)
    call.close()
    client.close()
    eventually(lambda: not held_regions(stub, regions))
    del answer
    assert own_regions() == []


@pytest.mark.parametrize(("protocol", "region"), [("grpc", "sealed"), ("http", "system")])
def test_it_goes_on_with_the_next(protocol: str, region: RegionName, mortal: MortalServer, gate: Gate) -> None:
    gate.close()
    url, prefix = url_of(mortal.server, protocol), mortal.server.shm_prefix
    with (
        ShmClient(url, timeout_s=60, pool=PoolOptions(region=region)) as client,
        client.prepare(
            "crash_stages",
            {"X": (X.shape, X.dtype)},
            outputs={"Y": X.nbytes},
            parameters=gate.parameters("half written"),
        ) as call,
    ):
        kept = client.infer("identity", {"INPUT0": X})["OUTPUT0"]
        call.inputs["X"][:] = X
        with ThreadPoolExecutor(1) as executor:
            answer = executor.submit(call.infer)
            gate.wait_for_model()
            stub = stub_of(mortal.server, "crash_stages")
            mortal.kill()
            with pytest.raises(ServerUnavailableError):
                answer.result()
        assert [*Path("/dev/shm").glob(f"{prefix}*"), *Path("/proc").glob(str(stub))] == []
        np.testing.assert_array_equal(kept, X)
        with pytest.raises(ServerUnavailableError):
            client.infer("identity", {"INPUT0": X})
        mortal.come_back()
        call.inputs["X"][:] = 5 * X
        with infer_until_answered(call) as result:
            np.testing.assert_array_equal(result["Y"], 5 * X + 1)
        with client.infer("identity", {"INPUT0": 3 * X}) as result:
            np.testing.assert_array_equal(result["OUTPUT0"], 3 * X)
    del kept, answer
    assert own_regions() == []
