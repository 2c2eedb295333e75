"""tritonclient alone, for one protocol, and the regions that its user has made and registered."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype, shared_memory

from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.server import EmbeddedServer

MODULES: Final[dict[str, Any]] = {"grpc": tritonclient.grpc, "http": tritonclient.http}


class PlainRegion:
    """A region without a header and a token; it has a name at the server and another one in /dev/shm."""

    def __init__(self, byte_size: int, prefix: str = "plain-") -> None:
        self.byte_size = byte_size
        self.name = f"region-{secrets.token_hex(4)}"
        self.key = f"/{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        self.path = Path("/dev/shm") / self.key.removeprefix("/")
        self.handle = shared_memory.create_shared_memory_region(self.name, self.key, byte_size, create_only=True)

    def write(self, *arrays: npt.NDArray[Any]) -> None:
        shared_memory.set_shared_memory_region(self.handle, list(arrays))

    def view(self, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = shared_memory.get_contents_as_numpy(self.handle, dtype, list(shape), offset)
        return found

    def destroy(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.touch()  # for tritonclient to unlink
        shared_memory.destroy_shared_memory_region(self.handle)


class PlainClient:
    """A client, and its regions, which go with it."""

    def __init__(self, protocol: str, server: EmbeddedServer) -> None:
        self.protocol = protocol
        self.module = MODULES[protocol]
        self.url = getattr(server, f"{protocol}_url")
        self.client = self.module.InferenceServerClient(self.url)
        self.regions: list[PlainRegion] = []

    def region(self, byte_size: int) -> PlainRegion:
        """Make a region, and register it."""
        self.regions.append(PlainRegion(byte_size))
        self.register(self.regions[-1])
        return self.regions[-1]

    def register(self, region: PlainRegion) -> None:
        self.client.register_system_shared_memory(region.name, region.key, region.byte_size)

    def in_band(self, name: str, array: npt.NDArray[Any]) -> Any:
        made = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array)
        return made

    def tensors_of(self, result: Any) -> dict[str, npt.NDArray[Any]]:
        """Return what came back with the response."""
        response = result.get_response()
        outputs = response.outputs if self.protocol == "grpc" else response.get("outputs", [])
        names = [each.name if self.protocol == "grpc" else each["name"] for each in outputs]
        return {name: np.asarray(result.as_numpy(name)) for name in names}

    def close(self) -> None:
        for region in self.regions:
            unregister_when_free(partial(self.client.unregister_system_shared_memory, region.name))
            region.destroy()
        self.client.close()
