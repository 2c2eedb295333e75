"""Models that give back what they get, at a server that loads them when it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..e2e.loading_server import LoadingServer, side_by_side

__all__ = ["Mirror"]

EVERY_PATH = "direct,triton-shm,inline"


class Mirror(LoadingServer):
    """A server, and models that it may load. Each passes X on as Y."""

    def configure(
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
        self.copy(name, "direct_only")
        self.grpc.load_model(name, config=json.dumps(config))

    def configure_all(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Load models side by side, as each load is spent in waiting."""
        side_by_side(lambda name: self.configure(name, **configs[name]), configs)
