"""What clients have registered at the server: the answer of its status endpoint, which is what gives names a meaning.

``GET v2/systemsharedmemory/status`` is part of Triton's system shared memory extension
(``extension_shared_memory.md``).
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

from ..errors import MachineError

__all__ = ["Registration", "fetch_json", "fetch_registrations"]

_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A system shared-memory region as it is registered.

    Attributes
    ----------
    key : str
        As registered: usually with a leading slash.
    offset, byte_size : int
        Which part of the object the name stands for.
    """

    key: str
    offset: int
    byte_size: int


def fetch_registrations(server_url: str) -> dict[str, Registration]:
    """Ask the server what is registered, by name.

    Raises
    ------
    MachineError
        Nobody answers there, or not as a Triton server does.
    """
    try:
        return {
            region["name"]: Registration(region["key"], int(region["offset"]), int(region["byte_size"]))
            for region in fetch_json(f"{server_url}/v2/systemsharedmemory/status")
        }
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        raise MachineError("the server's HTTP endpoint, which knows what is registered, does not answer") from None


def fetch_json(url: str) -> Any:
    """Return what the server answers, by no proxy: whatever ``http_proxy`` names must not speak for the server.

    Raises
    ------
    urllib.error.HTTPError
        The server refuses.
    OSError, http.client.HTTPException, ValueError
        Nobody answers there, or not in JSON.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=_TIMEOUT_S) as reply:
        return json.load(reply)
