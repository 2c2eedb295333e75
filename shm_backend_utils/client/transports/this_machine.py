"""Whether a server's host is this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["is_this_machine"]


def is_this_machine(host: str) -> bool:
    """Return whether a host's address is one of this machine's: only to those can a socket be bound."""
    try:
        addresses: Sequence[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False  # what the name means, the first request will tell
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
