"""Refusal codes: the first word of each error of a model half, by which both halves branch, as HTTP drops statuses."""

from __future__ import annotations

import re
from typing import Final

from ..errors import RegionGoneError, RegionRefusedError, ShmError

__all__ = ["NOT_OPENED", "code_in", "refusal"]

NOT_OPENED: Final = frozenset({RegionGoneError.code, RegionRefusedError.code})
"""Codes of models that could not open the memory: other memory may do."""

# Triton may put text of its own in front: a request's id, an ensemble's name. Nothing else may stand there: an error of
# model.py may quote another request's.
_CODE: Final = re.compile(r"(?:\[[^]]*\] |in ensemble '[^']*', )*(shm:[a-z]+): ")


def refusal(error: ShmError) -> str:
    """Return the text of an error for a remote caller: its code, a colon and its message."""
    return f"{error.code}: {error}"


def code_in(text: str) -> str:
    """Return the refusal code that an error's text begins with, for example ``"shm:stale"``; else empty."""
    found = _CODE.match(text)
    return "" if found is None else found[1]
