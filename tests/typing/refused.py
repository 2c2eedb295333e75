"""What users must not write: the error that a type checker has for each line is at its end. Never executed."""

from __future__ import annotations

import numpy as np

import shm_backend_utils
from shm_backend_utils import ShmClinet  # E: attr-defined
from shm_backend_utils import PoolOptions, Result, ShmClient, ShmSession
from shm_backend_utils.client import NoSuchError  # E: attr-defined

nonsense = shm_backend_utils.nonsense  # E: attr-defined
client = ShmClient("localhost:8001", path="fastest")  # E: arg-type
client = ShmClient("localhost:8001", pool=1 << 30)  # E: arg-type
client.infer("m")  # E: call-arg
client.infer("m", [np.ones(3)])  # E: arg-type
client.infer("m", {}, client_timeout=3)  # E: call-arg
client.infer("m", {}, request_id=7)  # E: arg-type
result: Result = client.submit("m", {})  # E: assignment
client.prepare("m", {"X": np.float32})  # E: dict-item
client.prepare("m", {}).inputs["X"] = np.ones(3)  # E: index
client.is_model_ready()  # E: call-arg
client.load_model("m", files={"file:1/model.py": "text"})  # E: dict-item
PoolOptions(max_byte=3)  # E: call-arg
ShmSession.from_args({}).serve([], lambda call: call.outptu("Y"))  # E: attr-defined
