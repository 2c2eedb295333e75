"""A server that loads models when it is told to; its models give back what they get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tritonclient.grpc

from shm_backend_utils.server import EmbeddedServer

from .server_options import installation_with

__all__ = ["Mirror"]

MODEL = Path(__file__).resolve().parents[1] / "models" / "direct_only"
EVERY_PATH = "direct,triton-shm,inline"


class Mirror:
    """A server, and models that it may load. Each passes X on as Y."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            shutil.copytree(MODEL, folder / "models" / name, ignore=shutil.ignore_patterns("__pycache__"))
        installation = installation_with(["--model-control-mode=explicit"], folder / "installation")
        self.server = EmbeddedServer.start(
            folder / "models", installation=installation, log_file=folder / "server.log", numpy="own"
        )
        self._grpc: Any = tritonclient.grpc.InferenceServerClient(self.server.grpc_url)

    def load(
        self,
        name: str,
        *,
        dims: tuple[int, ...] = (-1,),
        dtype: str = "FP32",
        max_batch_size: int = 0,
        paths: str = EVERY_PATH,
    ) -> None:
        """Load a model with this configuration, anew if it was loaded."""
        tensor = {"data_type": f"TYPE_{dtype}", "dims": dims}
        carrier = {"name": "SHM", "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
        config = {
            "backend": "python",
            "max_batch_size": max_batch_size,
            "input": [{"name": "X", "optional": True, **tensor}, *([carrier] if max_batch_size else [])],
            "output": [{"name": "Y", **tensor}],
            "parameters": {"SHM_PATHS": {"string_value": paths}},
            "instance_group": [{"kind": "KIND_CPU"}],
        }
        self._grpc.load_model(name, config=json.dumps(config))

    def load_all(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Load models side by side, as each load is spent in waiting."""
        with ThreadPoolExecutor(len(configs)) as executor:
            list(executor.map(lambda name: self.load(name, **configs[name]), configs))

    def unload(self, name: str) -> None:
        """Unload a model."""
        self._grpc.unload_model(name)

    def close(self) -> None:
        """Let go of the server, which somebody else ends."""
        self._grpc.close()
