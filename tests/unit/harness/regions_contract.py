"""What a server does with registered memory. The same of a harness and of a real server."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.releases import registers_a_key_again, takes_places_of_no_bytes
from tests.unit.harness.wires import Answer, Wire

SIZE = 64
PATIENCE_S = 20.0
MISSING = "Unable to find shared memory region: 'q'"
BEYOND = "Invalid offset + byte size for shared memory region: 'r'"
PLACES: dict[str, tuple[Any, Any, str, str]] = {
    "no region": (("q", 8, 0), None, "NOT_FOUND", MISSING),
    "beyond": (("r", 8, 60), None, "INVALID_ARGUMENT", BEYOND),
    "no bytes": (
        ("r", 0, 0),
        None,
        "INVALID_ARGUMENT",
        "[request id: <id_unknown>] input byte size mismatch for input 'X' for model 'behaving'. Expected 8, got 0",
    ),
    "no region for an output": (("r", 8, 0), ("q", 8, 0), "NOT_FOUND", MISSING),
    "output too small": (
        ("r", 8, 0),
        ("r", 4, 16),
        "INTERNAL",
        "shared memory size specified with the request for output 'Y' (4 bytes) should be at least 8 bytes to hold the "
        "results",
    ),
}


def register(wire: Wire, **said: Any) -> Answer:
    return wire.send("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(**said))


def unregister(wire: Wire, name: str) -> Answer:
    return wire.send("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name))


def unregister_all(wire: Wire) -> None:
    """Unregister whatever there is; a server answers a request a moment before it lets go of the request's regions."""
    deadline = time.monotonic() + PATIENCE_S
    status = service_pb2.SystemSharedMemoryStatusRequest()
    while unregister(wire, "").status != "OK" or wire.send("SystemSharedMemoryStatus", status).message.regions:
        assert time.monotonic() < deadline, "the server does not let go of its regions"
        time.sleep(0.01)


def infer(wire: Wire, source: tuple[str, int, int], target: tuple[str, int, int] | None) -> Answer:
    message = service_pb2.ModelInferRequest(model_name="behaving")
    tensors = [(message.inputs.add(name="X", datatype="FP32", shape=[2]), source)]
    if target is not None:
        tensors.append((message.outputs.add(name="Y"), target))
    for tensor, (region, byte_size, offset) in tensors:
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = byte_size
        if offset:
            tensor.parameters["shared_memory_offset"].int64_param = offset
    return wire.send("ModelInfer", message)


class RegionsContract:
    """Tests for whoever has a fixture ``wire``, as :class:`.Contract`."""

    @pytest.fixture
    def memory(self, wire: Wire) -> Iterator[shared_memory.SharedMemory]:
        with contextlib.ExitStack() as at_end:
            memory = shared_memory.SharedMemory(f"harness-{secrets.token_hex(6)}", create=True, size=SIZE)
            at_end.callback(memory.unlink)
            at_end.callback(memory.close)
            assert memory.buf is not None
            memory.buf[:8] = np.array([1, 2], np.float32).tobytes()
            assert register(wire, name="r", key=f"/{memory.name}", byte_size=SIZE).status == "OK"
            at_end.callback(unregister_all, wire)
            yield memory

    def test_inputs_are_read_there_and_outputs_written(self, wire: Wire, memory: shared_memory.SharedMemory) -> None:
        answer = infer(wire, ("r", 8, 0), ("r", 32, 16))
        assert [(each.name, list(each.shape)) for each in answer.message.outputs] == [("Y", [2])]
        assert list(answer.message.raw_output_contents) == [b""]
        assert memory.buf is not None
        assert np.frombuffer(bytes(memory.buf[16:24]), np.float32).tolist() == [1, 2]

    @pytest.mark.parametrize(
        "what", [pytest.param(what, marks=takes_places_of_no_bytes if what == "no bytes" else ()) for what in PLACES]
    )
    def test_places_are_checked(self, wire: Wire, memory: shared_memory.SharedMemory, what: str) -> None:
        source, target, status, text = PLACES[what]
        answer = infer(wire, source, target)
        assert (answer.status, answer.text) == (status, text)

    def test_registrations_are_checked(self, wire: Wire, memory: shared_memory.SharedMemory) -> None:
        key = f"/{memory.name}"
        taken = register(wire, name="r", key=key, byte_size=SIZE)
        assert (taken.status, taken.text) == ("ALREADY_EXISTS", "shared memory region 'r' already in manager")
        missing = register(wire, name="n", key="/nosuchkey", byte_size=8)
        assert (missing.status, missing.text) == ("INTERNAL", "Unable to open shared memory region: '/nosuchkey'")

    @registers_a_key_again
    def test_a_key_may_have_two_names(self, wire: Wire, memory: shared_memory.SharedMemory) -> None:
        key = f"/{memory.name}"
        for said in ({"byte_size": SIZE + 1}, {"byte_size": 40, "offset": 32}):
            large = register(wire, name="n", key=key, **said)
            refused = "failed to register shared memory region 'n': invalid args"
            assert (large.status, large.text) == ("INVALID_ARGUMENT", refused)
        assert register(wire, name="n", key=key, byte_size=8).status == "OK"

    def test_what_is_registered_is_told(self, wire: Wire, memory: shared_memory.SharedMemory) -> None:
        told = wire.send("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest())
        assert [(each.name, each.key, each.byte_size) for each in told.message.regions.values()] == [
            ("r", f"/{memory.name}", SIZE)
        ]
        assert unregister(wire, "r").status == "OK"
        assert unregister(wire, "r").status == "OK"
        gone = wire.send("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(name="r"))
        assert (gone.status, gone.text) == ("NOT_FOUND", "Unable to find system shared memory region: 'r'")
        assert infer(wire, ("r", 8, 0), None).status == "NOT_FOUND"
