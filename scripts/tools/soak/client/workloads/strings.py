"""Tensors of strings, on the direct path alone: a Python backend of Triton 2.51 does not survive them under NumPy 2."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..board import Phase
from ..checks import is_right
from ..connections import Connection
from ..kit import Kit

__all__ = ["strings"]

MOST_STRINGS: Final = 200
LONGEST: Final = 300
ALPHABET: Final = "abcdefghijklmnopqrstuvwxyzäöüßñéλж漢 ,.0123456789"
LENGTH_SIZE: Final = 4


def strings(kit: Kit, connection: Connection) -> None:
    """Have texts put into capitals."""
    texts = [
        "".join(kit.chance.choices(ALPHABET, k=int(kit.chance.triangular(0, LONGEST, 0))))
        for _ in range(kit.chance.randint(0, MOST_STRINGS))
    ]
    given = np.array([text.encode() for text in texts], object)
    expected = np.array([text.upper().encode() for text in texts], object)
    byte_size = sum(LENGTH_SIZE + len(text) for text in expected)
    kit.board.phase = Phase.IN_FLIGHT
    with kit.bounded("infer"):
        result = connection.caller.infer("text_upper", {"TEXT": given}, outputs=kit.room("UPPER", byte_size))
    kit.board.phase = Phase.READING
    if kit.is_checked(connection, "infer", is_right(result["UPPER"], expected)):
        kit.tally.add("done", "strings")
    if result.overflowed:
        kit.tally.add("done", "overflows")
    kit.pass_call()
