"""A gate at a stage of the model `crash_stages`: the test knows that the model stands there, and may let it go."""

from __future__ import annotations

import os
import select
from pathlib import Path

PATIENCE_S = 30


class Gate:
    """Two named pipes. The model stops at the gate once, when it was closed."""

    def __init__(self, folder: Path) -> None:
        self._arrived = folder / "arrived"
        self._go = folder / "go"

    def parameters(self, stage: str) -> dict[str, str]:
        return {"stage": stage, "arrived": str(self._arrived), "go": str(self._go)}

    def close(self) -> None:
        """Make the next request stop that comes to the gate's stage."""
        os.mkfifo(self._go)
        os.mkfifo(self._arrived)

    def wait_for_model(self) -> None:
        pipe = os.open(self._arrived, os.O_RDONLY | os.O_NONBLOCK)
        try:
            readable, _, _ = select.select([pipe], [], [], PATIENCE_S)
        finally:
            os.close(pipe)
        self._arrived.unlink()
        assert readable, "the model did not come to this gate"

    def let_go(self) -> None:
        with self._go.open("w"):
            pass
