"""Where a call's tensors lie: a slot, or a part of one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .plan import CallPlan
from .slot import Slot, Turn

__all__ = ["Berth"]


class Berth(NamedTuple):
    """Memory for one call.

    Attributes
    ----------
    slot : Slot
    turn : Turn
        The slot's turn through which the call's requests are fenced.
    plan : CallPlan
        Where in the slot the tensors lie.
    memory : numpy.ndarray of uint8
        The slot's whole region. When it, and every array made from it, are gone, the berth is given back.
    """

    slot: Slot
    turn: Turn
    plan: CallPlan
    memory: npt.NDArray[np.uint8]
