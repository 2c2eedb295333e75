"""tritonclient for one protocol, and regions that ``shm_util`` makes with it for the model `every_dtype`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http

from shm_backend_utils.compat.shm_util import ShmRegions, create_set_shm_regions, unregister_cleanup_shm_regions
from shm_backend_utils.server import EmbeddedServer

MODULES: Final[dict[str, Any]] = {"grpc": tritonclient.grpc, "http": tritonclient.http}
X: Final = np.arange(1, 6, dtype=np.float32)
COUNTS: Final = np.arange(3, dtype=np.int32)


class Wire:
    """tritonclient for one protocol, which can be made to fail."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        self.protocol = protocol
        self.server = server
        url = server.grpc_url if protocol == "grpc" else server.http_url
        self.client = MODULES[protocol].InferenceServerClient(url)
        self._of_others = self._known()

    def create(self, inputs: Any, outputs: Any, names: Any = None, sizes: Any = None) -> ShmRegions:
        return create_set_shm_regions(inputs, outputs, names, sizes, self.client, self.protocol)

    def four(self, names: Any = ("a", "b", "c", "d")) -> ShmRegions:
        return self.create([("IN_FP32", X), ("IN_INT32", COUNTS)], [("OUT_FP32", 20), ("OUT_INT32", 12)], names)

    def clean_up(self, handles: Any) -> None:
        unregister_cleanup_shm_regions(handles, self.client, self.protocol)

    def infer(self, model: str, regions: ShmRegions) -> Any:
        return self.client.infer(model, regions.inputs, outputs=regions.outputs)

    def registered(self) -> dict[str, str]:
        """Return the key of each name that the server knows, but for those that were there before."""
        return {name: key for name, key in self._known().items() if name not in self._of_others}

    def _known(self) -> dict[str, str]:
        status = self.client.get_system_shared_memory_status()
        if self.protocol == "grpc":
            return {name: region.key for name, region in status.regions.items()}
        return {region["name"]: region["key"] for region in status}


@contextlib.contextmanager
def wire_to(server: EmbeddedServer, protocol: str) -> Iterator[Wire]:
    """Yield a client; see that nothing of it is left at the server, as every test sees that nothing is left here."""
    wire = Wire(protocol, server)
    yield wire
    left = wire.registered()
    for name in left:
        wire.client.unregister_system_shared_memory(name)
    wire.client.close()
    assert left == {}
