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
ROW_LENGTH = 2**20  # every float of a row is another one, and exact
IMAGES = 4, 3, 224, 224


def identity(client: ShmClient, row_count: int) -> None:
    """Have so many rows of 4 MiB passed on."""
    shape = (row_count * ROW_LENGTH,)
    with client.prepare("identity", {"INPUT0": (shape, np.float32)}, outputs={"OUTPUT0": 0}) as call:
        rows = call.inputs["INPUT0"].reshape(row_count, ROW_LENGTH)
        for number, row in enumerate(rows):
            row[:] = np.arange(number, number + ROW_LENGTH, dtype=np.float32)
        result = call.infer()
        output = result["OUTPUT0"]
        told: dict[str, Any] = {
            "path": result.path,
            "in place": bool(np.shares_memory(output, rows)),
            "right": all(
                (row == np.arange(number, number + ROW_LENGTH, dtype=np.float32)).all()
                for number, row in enumerate(output.reshape(rows.shape))
            ),
            "why": str(client.explain("identity")),
        }
        tell(told)


def multiply(client: ShmClient) -> None:
    """Have something computed, which the model cannot do without the inputs."""
    x = np.arange(np.prod(IMAGES), dtype=np.float32).reshape(IMAGES)
    with client.infer("multiply", {"INPUT0": x}) as result:
        tell({"path": result.path, "right": bool((result["OUTPUT0"] == 2 * x).all())})


def tell(what: object) -> None:
    """Say it, and wait until the test has looked at what is there now."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def server(models: str, log_file: str) -> None:
    """Serve, tell the addresses, and stop when the standard input ends."""
    with EmbeddedServer.start(Path(models), log_file=Path(log_file)) as served:
        print(json.dumps({"grpc": served.grpc_url, "http": f"http://{served.http_url}"}), flush=True)
        sys.stdin.read()


def client(url: str, region: str, row_count: str) -> None:
    """Call two models, and tell what came of it; each time wait for a line."""
    with ShmClient(url, inline_bytes=0, pool=PoolOptions(region=cast("RegionName", region))) as client:
        multiply(client)
        identity(client, int(row_count))


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
