"""A program that ends while tensors, results, a prepared call, a client and its model are all alive: MODEL LIBRARY."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from shm_backend_utils.client import ShmClient
from shm_backend_utils.testing.harness import ModelHarness

from .gpu import load_fake_gpu, load_gpu

folder, library, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
gpu = (load_fake_gpu if kind == "fake" else load_gpu)(library)
harness = ModelHarness.in_child(folder)
client = ShmClient(harness, cuda=gpu.access)
place = (1000,), np.float32, "cuda:0"
tensor = gpu.kernels.tensor(1000, 0)
results = [client.infer(folder.name, {"INPUT0": tensor}, outputs={"OUTPUT0": place}) for _ in range(2)]
arrays = [result["OUTPUT0"] for result in results]
call = client.prepare(folder.name, {"INPUT0": place}, outputs={"OUTPUT0": place})
last = call.infer()["OUTPUT0"]
print("all alive")
