"""Programs in another place than a test's, as in containers of a pod: each tells what came of it by lines of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from shm_backend_utils.cli.doctor import examine
from shm_backend_utils.client import PathUnavailableError, PoolOptions, ShmClient
from shm_backend_utils.memory.descriptors import PRIVATE, Descriptor
from shm_backend_utils.memory.handover.server import REGISTRY
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.server import EmbeddedServer

_CLONE_NEWNET = 0x40000000
_X = np.arange(1000, dtype=np.float32)
IMAGES = 4, 3, 224, 224


def server(models: str, log_file: str) -> None:
    """Serve, tell the addresses, and stop when the standard input ends."""
    with EmbeddedServer.start(Path(models), log_file=Path(log_file)) as served:
        print(json.dumps({"grpc": served.grpc_url, "http": f"http://{served.http_url}"}), flush=True)
        sys.stdin.read()


def client(url: str, region: str, row_count: str) -> None:
    """Have something computed, and rows of 4 MiB passed on; tell, and wait until the test has looked at what is there.

    What is computed, the model cannot do without the inputs.
    """
    images = np.arange(np.prod(IMAGES), dtype=np.float32).reshape(IMAGES)
    with (
        ShmClient(url, inline_bytes=0, pool=PoolOptions(region=cast("RegionName", region))) as client,
        client.infer("multiply", {"INPUT0": images}) as computed,
        client.prepare("identity", {"INPUT0": ((int(row_count) * 2**20,), np.float32)}, outputs={"OUTPUT0": 0}) as call,
    ):
        x = call.inputs["INPUT0"]
        x[:] = np.arange(x.size, dtype=np.float32)
        with call.infer() as result:
            told: dict[str, Any] = {
                "paths": [computed.path, result.path],
                "right": bool((computed["OUTPUT0"] == 2 * images).all() and np.array_equal(result["OUTPUT0"], x)),
                "in place": bool(np.shares_memory(result["OUTPUT0"], x)),
                "why": str(client.explain("identity")),
            }
            print(json.dumps(told), flush=True)
            sys.stdin.readline()


def open_server_elsewhere() -> SealedKey:
    """Open the socket of this process' sealed regions in a network namespace that nobody else has; return a key there.

    It stays open until that region is withdrawn. A thread has the network of the one that has started it.
    """
    keys: list[SealedKey] = []
    number = next(REGISTRY.numbers)

    def leave() -> None:
        if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
            raise OSError("unshare")
        keys.append(REGISTRY.offer(number, b"", PRIVATE, lambda: Descriptor(os.eventfd, 0)))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    (key,) = keys
    return key


def another_network(url: str) -> None:
    """Reach the server while the socket of this client's memory is in another network."""
    key = open_server_elsewhere()
    with ShmClient(url, inline_bytes=0) as client, client.infer("identity", {"INPUT0": _X}) as result:
        told = {"path": result.path, "right": bool((result["OUTPUT0"] == _X).all())}
        told["why"] = str(client.explain("identity"))
    with ShmClient(url, inline_bytes=0, pool=PoolOptions(region="sealed")) as client:
        try:
            client.infer("identity", {"INPUT0": _X}, path="direct").release()
        except PathUnavailableError as error:
            told["refusal"] = str(error)
    REGISTRY.withdraw(key.number)
    print(json.dumps(told))


def doctor(url: str, model: str, where: str) -> None:
    """Examine from here; the sealed memory of this process may be out of reach, too."""
    key = open_server_elsewhere() if where == "elsewhere" else None
    checkup = examine(url, model)
    if key is not None:
        REGISTRY.withdraw(key.number)
    codes = sorted(finding.trouble.code for finding in checkup.findings)
    fine = [line for _, line in checkup.fine]
    found = [finding.found for finding in checkup.findings]
    print(json.dumps({"codes": codes, "fine": fine, "found": found, "status": checkup.exit_status}))


PROGRAMS: Final[dict[str, Callable[..., None]]] = {
    "server": server,
    "client": client,
    "another_network": another_network,
    "doctor": doctor,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
