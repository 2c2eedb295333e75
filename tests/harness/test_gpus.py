"""Client and model on one GPU of one process: CUDA IPC cannot open a process' own memory, but a descriptor can."""

from __future__ import annotations

from typing import Any

import numpy as np

from shm_backend_utils.client import ShmClient
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.eventually import eventually
from tests.e2e.fake_gpus import DRIVER, MODEL, X, content_of, left_here
from tests.harness.conftest import REPOSITORIES

MODELS = (MODEL, "fake_gpu_pinned")
WAYS = ("cuIpcOpenMemHandle", "cuMemImportFromShareableHandle")
DEEDS = ("double", "double_in_memory_of_its_own", "double_on_the_host", "forward")


def test_a_harness_shares_gpu_memory() -> None:
    runtime, before = DRIVER.runtime(), left_here()
    opened, imported = (DRIVER.count(name) for name in WAYS)
    with (
        ModelHarness(*(REPOSITORIES[0] / model for model in MODELS)) as harness,
        ShmClient(harness, cuda=CudaAccess(lambda: runtime)) as client,
    ):
        for deed in DEEDS:
            x: Any = DRIVER.tensor(X)
            outputs = {"Y": (X.shape, X.dtype, "cuda:0")}
            with client.infer(MODEL, {"X": x}, outputs=outputs, parameters={"deed": deed}, path="direct") as result:
                np.testing.assert_array_equal(content_of(result["Y"]), X * 2)
    del x
    eventually(lambda: not runtime.retired.collect() and left_here() == before)
    assert [DRIVER.count(name) for name in WAYS] == [opened, imported + len(MODELS)]  # each has mapped it once
    assert DRIVER.violations() == []
