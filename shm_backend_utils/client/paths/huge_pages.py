"""Whether sealed memory can be of huge pages, where a client wants that and can do without."""

from __future__ import annotations

import logging
from typing import Final

from ...errors import MachineError
from ...memory.kinds import RegionKind
from ...memory.pool.options import PoolOptions
from ...memory.pool.slot import SlotRegion
from ...protocol.layout import PAGE_SIZE
from ..explanation import Check

__all__ = ["look_for_huge_pages"]

_LOG: Final = logging.getLogger(__name__)
_NAME: Final = "huge pages?"


def look_for_huge_pages(options: PoolOptions) -> Check | None:
    """Return whether a region of huge pages can be made; None where none is wanted, or nothing else will do.

    With ``region="auto"``, memory of ordinary pages will; that is told. With ``region="sealed"`` it will not.
    """
    if not options.huge_pages or options.region != "auto":
        return None
    try:
        SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, options.access, kind=RegionKind.HUGE).destroy()
    except MachineError as error:
        _LOG.warning("sealed memory is taken in ordinary pages: %s", error)
        return Check(_NAME, False, f"ordinary ones are taken instead: {error}", ())
    return Check(_NAME, True, "the machine has some set aside", ())
