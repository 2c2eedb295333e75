"""The two request parameters by which a request names its slot: ``shm_slot`` and ``shm_generation``. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from ..errors import TableError, VersionError
from .layout import MAX_SLOT_COUNT, VERSION

__all__ = ["GENERATION_PARAMETER", "SLOT_PARAMETER", "SlotAddress", "parse_address", "parse_generation"]

SLOT_PARAMETER: Final = "shm_slot"
GENERATION_PARAMETER: Final = "shm_generation"

_MAX_INT64: Final = 2**63 - 1
_ADDRESS: Final = re.compile(r"([^/]+)/(shmbu-[0-9a-z-]{1,64})/([0-9a-f]{32})/(0|[1-9][0-9]{0,3})")


class SlotAddress(NamedTuple):
    """Which slot a request uses, and which model it speaks to."""

    model: str  # an ensemble gives parameters to every step: others ignore them
    key: str  # in /dev/shm, without a slash; it begins with shmbu-
    token: str  # the secret in the region's header: 32 lowercase hexadecimal digits
    slot: int

    def __str__(self) -> str:
        """Return the value of ``shm_slot``."""
        return f"{VERSION}/{self.model}/{self.key}/{self.token}/{self.slot}"


def parse_address(value: Any) -> SlotAddress:
    """Read the value of ``shm_slot``; TableError if it is no address, VersionError if it is another version's."""
    if type(value) is not str:
        raise TableError(SLOT_PARAMETER, f"a value of type {type(value).__name__}", "a string")
    version, _, rest = value.partition("/")
    if version != str(VERSION):
        raise VersionError(version if version.isdecimal() and len(version) < 8 else "none", VERSION)
    found = _ADDRESS.fullmatch(rest)
    if found is None or int(found[4]) >= MAX_SLOT_COUNT:
        raise TableError(SLOT_PARAMETER, "other text", f"{VERSION}/MODEL/KEY/TOKEN/SLOT")
    return SlotAddress(found[1], found[2], found[3], int(found[4]))


def parse_generation(value: Any) -> int:
    """Return the value of ``shm_generation``; raise :class:`TableError` if it is no generation."""
    if type(value) is int and 1 <= value <= _MAX_INT64:
        return value
    raise TableError(GENERATION_PARAMETER, "no such number", "an integer from 1 to 2^63 - 1")
