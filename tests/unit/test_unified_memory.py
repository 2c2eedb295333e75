"""Managed memory (``cudaMallocManaged``), a device type of its own in DLPack: models take it, as clients do."""

from __future__ import annotations

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.access import CudaAccess
from shm_backend_utils.model import Call
from tests.unit.fake_gpu import DRIVER, runtime_that_gives_all_back
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client


def test_an_output_in_managed_memory_is_one_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(4, dtype=np.float32)
    with runtime_that_gives_all_back() as cuda:

        def infer(call: Call) -> None:
            call.put("Y", DRIVER.tensor(values, kind="managed"))

        with session_of(monkeypatch, [], [tensor("Y")], cuda=CudaAccess(lambda: cuda)) as session:
            client = Client()
            (response,) = session.serve([client.request({}, {"Y": 16})], infer)
            assert response.error() is None
            np.testing.assert_array_equal(client.output("Y"), values)
            client.close()
