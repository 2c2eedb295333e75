"""Where the server that has started this process serves HTTP: it alone may say what registered names stand for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

__all__ = ["url_of_parent"]

_PROGRAM: Final = "tritonserver"
_DEFAULT_PORT: Final = "8000"
_OFF: Final = frozenset({"false", "0"})
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""How a server that listens everywhere is reached. ``localhost`` may mean another address, where anybody may listen."""


def url_of_parent() -> str | None:
    """Return the URL of the tritonserver that this process is a stub of; None if that cannot be told.

    By its command line: the parent may be no tritonserver but a process that has one inside, or serve no HTTP. Then
    whoever listens at the usual port is somebody else.
    """
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return None
    if PurePath(words[0]).name != _PROGRAM or (_option(words, "--allow-http") or "").lower() in _OFF:
        return None
    address = _option(words, "--http-address") or ""
    host = _LOOPBACK.get(address, address)
    port = _option(words, "--http-port") or _DEFAULT_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _option(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an option, which is what counts."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found
