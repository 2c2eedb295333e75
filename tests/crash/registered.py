"""Somebody else at the server: who sees which regions are registered there, and may unregister any of them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonclient.grpc

from shm_backend_utils.client.paths.triton_shm import unregister_when_free
from shm_backend_utils.server import EmbeddedServer

OURS = f"shmbu-{os.getpid()}-"


class SomebodyElse:
    """A plain client."""

    def __init__(self, grpc: Any) -> None:
        self.grpc = grpc

    @classmethod
    @contextlib.contextmanager
    def at(cls, server: EmbeddedServer) -> Iterator[SomebodyElse]:
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        try:
            yield cls(grpc)
        finally:
            grpc.close()

    def registered(self) -> set[str]:
        return set(self.grpc.get_system_shared_memory_status(as_json=True).get("regions", {}))

    def registered_by_this_process(self) -> set[str]:
        return {name for name in self.registered() if name.startswith(OURS)}

    def unregister_those_of_this_process(self) -> None:
        names = self.registered_by_this_process()
        assert names
        for name in names:
            unregister_when_free(functools.partial(self.grpc.unregister_system_shared_memory, name))

    def unregister_all(self) -> None:
        assert self.registered_by_this_process()
        self.grpc.unregister_system_shared_memory()


def files_of_this_process() -> set[Path]:
    return set(Path("/dev/shm").glob(f"{OURS}*"))


@contextlib.contextmanager
def losing_files() -> Iterator[None]:
    """Have somebody remove the files of the regions that are made in the block."""
    before = files_of_this_process()
    yield
    for file in files_of_this_process() - before:
        file.unlink()
