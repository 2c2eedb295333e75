"""triton-shm-client, if it is installed. No extra of this package has it: it wants another NumPy than the others."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

__all__ = ["OTHER_CLIENT", "connect_other_client", "has_other_client"]

OTHER_CLIENT: Final = "triton-shm-client"
_MODULE: Final = "triton_shm_client"


def has_other_client() -> bool:
    """Return whether it is installed."""
    return importlib.util.find_spec(_MODULE) is not None


def connect_other_client(url: str) -> Any:
    """Return its client of a server, to be closed."""
    return importlib.import_module(_MODULE).TritonSHMClient(url)
