"""A client that reaches the server while its memory's socket is in another network. Tells what came of it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading

import numpy as np

from shm_backend_utils.client import PathUnavailableError, PoolOptions, ShmClient
from shm_backend_utils.memory.descriptors import PRIVATE, Descriptor
from shm_backend_utils.memory.handover.server import REGISTRY
from shm_backend_utils.protocol.handover import SealedKey

_CLONE_NEWNET = 0x40000000
_X = np.arange(1000, dtype=np.float32)


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


def main(url: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
