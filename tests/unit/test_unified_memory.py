"""Unified memory (``cudaMallocManaged``), a device type of its own in DLPack: models take it, as clients do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.model import Call
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.fake_gpu import runtime_that_gives_all_back
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

UNIFIED = 13  # dlpack.h: kDLCUDAManaged


class Unified:
    """An array of another library, in unified memory."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return UNIFIED, self._array.device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(stream=arguments.get("stream"))


def unified(cuda: FakeCuda, values: Any) -> Unified:
    array = cuda.empty(values.shape, values.dtype)
    array[...] = values
    return Unified(array)


def test_an_output_in_unified_memory_is_one_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(4, dtype=np.float32)
    with runtime_that_gives_all_back() as cuda:

        def infer(call: Call) -> None:
            call.put("Y", unified(cuda, values))

        with session_of(monkeypatch, [], [tensor("Y")], cuda=CudaAccess(lambda: cuda)) as session:
            client = Client()
            (response,) = session.serve([client.request({}, {"Y": 16})], infer)
            assert response.error is None
            np.testing.assert_array_equal(client.output("Y"), values)
            client.close()
