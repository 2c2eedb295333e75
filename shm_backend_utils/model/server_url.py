"""Where the server that has started this process serves HTTP."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePath
from typing import Final

__all__ = ["url_of_server"]

_PROGRAM: Final = "tritonserver"
_ALLOW: Final = "--allow-http"
_ADDRESS: Final = "--http-address"
_PORT: Final = "--http-port"
_DEFAULT_PORT: Final = "8000"
_OFF: Final = frozenset({"false", "0"})
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""How a server that listens everywhere is reached."""
_MEANS_MORE: Final = "localhost"
"""Which may mean another address than the server's, where anybody may listen."""
_VERTEX_AI: Final = ("AIP_MODE", "PREDICTION")
"""An environment in which builds for Vertex AI serve no HTTP, unless they are told to (``command_line_parser.cc``)."""
_BACKEND: Final = "triton_python_backend_utils"
_EMULATED: Final = "__server_url__"


def url_of_server() -> str | None:
    """Return the URL of the server that has started this process; None if that cannot be told.

    Its command line tells: the parent may be no tritonserver but a process that has one inside, or serve no HTTP. Then
    the listener at the usual port is another program. An emulated Python backend says where its own server is.
    """
    emulated: str | None = getattr(sys.modules.get(_BACKEND), _EMULATED, None)
    if emulated:
        return emulated
    try:
        words = os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")
    except OSError:
        return None
    options: dict[str, str] = {}  # by name; the last value counts
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        options[name] = value if equals else following
    if PurePath(words[0]).name != _PROGRAM or any(map(_is_abbreviated, options)):
        return None
    allowed, (name, value) = options.get(_ALLOW), _VERTEX_AI
    if allowed is None and os.environ.get(name) == value:
        return None
    address = options.get(_ADDRESS, "")
    if (allowed or "").lower() in _OFF or address == _MEANS_MORE:
        return None
    host, port = _LOOPBACK.get(address, address), options.get(_PORT) or _DEFAULT_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_abbreviated(name: str) -> bool:
    """Return whether a word may be short for an option that counts here, which getopt_long(3) allows."""
    return len(name) > 2 and any(option.startswith(name) and option != name for option in (_ALLOW, _ADDRESS, _PORT))
