"""What the server is asked for, and what its refusals become on the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .errors import TritonModelException
from .host import Host

__all__ = ["asked"]

_T = TypeVar("_T")


def asked(host: Host, failed: str, action: Callable[[], _T]) -> _T:
    """Return what the host answers to an action; TritonModelException, which begins with ``failed``, if it refuses."""
    try:
        return action()
    except TritonModelException as error:
        where = f"Failed to process the request for model '{host.instance_name()}', message"
        raise TritonModelException(f"{failed}: {where}: {error}") from None
