"""What users must not write: the errors that mypy and pyright have for each line are at its end. Never executed."""

from __future__ import annotations

import numpy as np

import shm_backend_utils
from shm_backend_utils import ShmClinet  # E: attr-defined, reportAttributeAccessIssue
from shm_backend_utils import PoolOptions, Result, ShmClient, ShmSession
from shm_backend_utils.client import NoSuchError  # E: attr-defined, reportAttributeAccessIssue

nonsense = shm_backend_utils.nonsense  # E: attr-defined, reportAttributeAccessIssue
client = ShmClient("localhost:8001", path="fastest")  # E: arg-type, reportArgumentType
client = ShmClient("localhost:8001", pool=1 << 30)  # E: arg-type, reportArgumentType
client = ShmClient("localhost:8001", ssl=True)  # E: arg-type, reportArgumentType
client.infer("m")  # E: call-arg, reportCallIssue
client.infer("m", [np.ones(3)])  # E: arg-type, reportArgumentType
client.infer("m", {}, client_timeout=3)  # E: call-arg, reportCallIssue
client.infer("m", {}, request_id=7)  # E: arg-type, reportArgumentType
result: Result = client.submit("m", {})  # E: assignment, reportAssignmentType
result.as_numpy("Y")  # E: attr-defined, reportAttributeAccessIssue
client.prepare("m", {"X": np.float32})  # E: dict-item, reportArgumentType
client.prepare("m", {}).inputs["X"] = np.ones(3)  # E: index, reportIndexIssue
client.infer("m", {}, library="tensorflow")  # E: arg-type, reportArgumentType
client.prepare("m", {}, cuda_stream=1)  # E: call-arg, reportCallIssue
client.is_model_ready()  # E: call-arg, reportCallIssue
client.load_model("m", files={"file:1/model.py": "text"})  # E: dict-item, reportArgumentType
PoolOptions(max_byte=3)  # E: call-arg, reportCallIssue
ShmSession.from_args({}).serve([], lambda call: call.outptu("Y"))  # E: attr-defined, reportAttributeAccessIssue
