"""Whether a server's host is this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from ...memory.descriptors import NO_DESCRIPTORS, translate_os_errors

__all__ = ["is_this_machine"]


@translate_os_errors("to look up a host takes a file descriptor")
def is_this_machine(host: str) -> bool:
    """Return whether a socket can be bound to a host: only to this machine's; NoDescriptorsError if nothing tells."""
    try:
        addresses: Sequence[Any] = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        return _no(error)  # what the name means, the first request will tell
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError as error:
        return _no(error)
    return True


def _no(error: OSError) -> bool:
    """Return that it is not, unless nothing could be found out."""
    if error.errno in NO_DESCRIPTORS:
        raise error
    return False
