"""The server is killed in the middle of a call, and comes back on the same ports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, ServerUnavailableError, ShmClient
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..e2e.flavours import url_of
from ..e2e.own_regions import own_regions
from .gate import Gate
from .processes import infer_until_answered, stub_of

SHM = Path("/dev/shm")
X = np.arange(1000, dtype=np.float32)


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
        assert [*SHM.glob(f"{prefix}*"), *Path("/proc").glob(str(stub))] == []
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
