"""Memory that is registered before: by the class that triton-shm-client's users know, and by plain tritonclient."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ServerUnavailableError
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
from shm_backend_utils.memory.segment import SystemSegment

from ..board import Phase
from ..checks import is_right
from ..connections import Connection
from ..kit import CALL_TIMEOUT_S, Kit
from ..models import MODELS, MOST_ROWS, Said

__all__ = ["ATTACHED_PREFIX", "PlainClientError", "attached", "compat"]

ATTACHED_PREFIX: Final = "soak-attached-"
ATTACHED_BYTES: Final = 1 << 18
MOST_CALLS: Final = 4


class PlainClientError(Exception):
    """A call of plain tritonclient failed."""


def compat(kit: Kit, connection: Connection) -> None:
    """Register a model at a TritonSHMClient, and infer more rows than it takes at once."""
    width = kit.chance.randint(1, 4096)
    declared = [("X", (width,), np.uint32)], [("Y", (width,), np.uint32)]
    with closing(TritonSHMClient(kit.urls["grpc"])) as client:
        client.register_shm_model("rows", *declared, max_batch_size=MOST_ROWS, pool_size=kit.chance.randint(1, 3))
        for _ in range(kit.chance.randint(1, MOST_CALLS)):
            count = kit.chance.randint(1, 3 * MOST_ROWS)
            rows = kit.noise.like(np.empty((count, width), np.uint32))
            kit.board.phase = Phase.IN_FLIGHT
            with kit.bounded("infer_shm", 3 * CALL_TIMEOUT_S):  # so many requests, one after another
                results = client.infer_shm("rows", {"X": rows}, client_timeout=CALL_TIMEOUT_S)
            found = is_right(results["Y"], np.invert(rows))
            kit.checked(f"TritonSHMClient, {connection.protocol}, infer_shm", found)
            if found:
                kit.tally.add("done", "compat")
        client.unregister_shm_model("rows")


def attached(kit: Kit, connection: Connection) -> None:
    """Describe registered regions to a model, and send that with plain tritonclient."""
    module: Any = tritonclient.grpc if connection.protocol == "gRPC" else tritonclient.http
    address = kit.urls["grpc"] if connection.protocol == "gRPC" else kit.urls["http"].removeprefix("http://")
    try:
        with ExitStack() as at_end:
            _attached(kit, connection, module, at_end.enter_context(closing(_client(module, address))), at_end)
    except ServerUnavailableError:
        raise
    except (InferenceServerException, OSError) as error:
        raise PlainClientError(str(error)) from error


def _client(module: Any, address: str) -> Any:
    if module is tritonclient.grpc:
        return module.InferenceServerClient(address)
    return module.InferenceServerClient(address, connection_timeout=CALL_TIMEOUT_S, network_timeout=CALL_TIMEOUT_S)


def _attached(kit: Kit, connection: Connection, module: Any, client: Any, at_end: ExitStack) -> None:
    model = MODELS["halves"]
    name = f"{ATTACHED_PREFIX}{os.getpid()}-{kit.chance.getrandbits(64):016x}"
    segment = SystemSegment.create(name, 2 * ATTACHED_BYTES)
    at_end.callback(segment.close)
    at_end.callback(segment.unlink)
    memory = np.frombuffer(segment.buffer(), np.uint8)
    client.register_system_shared_memory(name, f"/{name}", 2 * ATTACHED_BYTES)
    at_end.callback(client.unregister_system_shared_memory, name)
    named: dict[str, Any] = {"client_timeout": CALL_TIMEOUT_S} if module is tritonclient.grpc else {}
    for _ in range(kit.chance.randint(1, MOST_CALLS)):
        payload, said = kit.noise.words(most=ATTACHED_BYTES), Said.random(kit.chance)
        memory[: payload.nbytes] = payload.view(np.uint8)
        given = module.InferInput(model.source, [len(payload)], "UINT32")
        given.set_shared_memory(name, payload.nbytes)
        wanted = module.InferRequestedOutput(model.sink)
        wanted.set_shared_memory(name, ATTACHED_BYTES, ATTACHED_BYTES)
        request = attach(model.name, [given], [wanted], parameters=said.parameters)
        kit.board.phase = Phase.IN_FLIGHT
        with kit.bounded("infer of tritonclient"):
            client.infer(model.name, **request, **named)
        found = memory[ATTACHED_BYTES:][: payload.nbytes].view(np.uint32)
        expected = model.expected(payload, Said(said.parameters))
        kit.checked(f"tritonclient, {connection.protocol}, attach", is_right(found, expected))
        kit.tally.add("done", "attach")
        if said.has_parameters:
            kit.tally.add("done", "parameters")
