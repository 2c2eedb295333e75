"""What there is in the running stub process, the stubs have; signatures are compared by way of the emulator."""

from __future__ import annotations

import json

from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer

from .sources import MODULES, declared

# What every class has, and what pybind11 keeps.
UNTYPED = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__repr__", "__str__", "__getstate__", "__setstate__"),
    *("__entries", "__init__"),
}


def test_every_name_of_the_running_server_is_declared(triton_server: EmbeddedServer) -> None:
    with ShmClient(triton_server.grpc_url, timeout_s=60) as client:
        report = json.loads(bytes(client.infer("backend_names", {}, outputs={"REPORT": 1 << 20})["REPORT"]))
    for module in MODULES:
        names = [name for name in report[module] if not name.startswith("__")]
        found = {name for name in names if UNTYPED.isdisjoint(name.split("."))}
        assert len(found) > 10
        assert found - declared(module) == set()
