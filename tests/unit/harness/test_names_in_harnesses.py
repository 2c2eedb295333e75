"""A session in a harness finds what registered names stand for now, as on a server: nobody tells it but the kernel."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2
from tritonclient.utils import shared_memory

from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.harness.wires import HarnessWire

IDENTITY = Path(__file__).resolve().parents[3] / "model_repository" / "identity"
ROW = 64
PAGE = 4096
STEPS = 150


@pytest.fixture(params=[ModelHarness, ModelHarness.in_child], ids=["in process", "in a child"])
def wire(request: pytest.FixtureRequest) -> Iterator[HarnessWire]:
    with request.param(IDENTITY) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.fixture
def keys() -> Iterator[dict[str, Any]]:
    made = [f"/harness-{secrets.token_hex(6)}" for _ in range(3)]
    handles = {key: shared_memory.create_shared_memory_region(key, key, PAGE, create_only=True) for key in made}
    yield handles
    for handle in handles.values():
        shared_memory.destroy_shared_memory_region(handle)


def test_names_mean_what_they_mean_now(wire: HarnessWire, keys: dict[str, Any]) -> None:
    chance = random.Random(7)
    names, meanings = [f"name-{secrets.token_hex(4)}" for _ in range(2)], dict[str, str]()
    for number, handle in enumerate(keys.values()):
        begin(handle)[:] = number
    for _ in range(STEPS):
        name = chance.choice(names)
        if meanings.pop(name, None) is not None:
            wire.send("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name))
        if chance.random() < 0.8:
            key = chance.choice([key for key in keys if key not in meanings.values()])
            order = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=PAGE)
            assert wire.send("SystemSharedMemoryRegister", order).status == "OK"
            meanings[name] = key
        source, target = chance.choice(names), chance.choice(names)
        x, y = InferInput("INPUT0", [ROW // 4], "FP32"), InferRequestedOutput("OUTPUT0")
        x.set_shared_memory(source, ROW)
        y.set_shared_memory(target, ROW, ROW)
        parameters: Any = attach("identity", [x], [y])["parameters"]
        try:
            wire.harness.infer({}, outputs=["OUTPUT0"], parameters=parameters)
        except InferenceError as error:
            assert "not registered" in str(error)  # noqa: PT017  # an error is one of two right answers
            assert not {source, target} <= meanings.keys()
            continue
        assert {source, target} <= meanings.keys()
        written = begin(keys[meanings[target]], ROW)
        assert written.tolist() == [list(keys).index(meanings[source])] * (ROW // 4)
        written[:] = -1


def begin(handle: Any, offset: int = 0) -> Any:
    """Return the first numbers of an object, as it has them now."""
    return shared_memory.get_contents_as_numpy(handle, np.float32, [ROW // 4], offset)
