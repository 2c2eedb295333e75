"""Streams of a decoupled model: taken to their end, or left early; frames held, or let go at once."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..board import Phase
from ..checks import is_right
from ..connections import Connection
from ..kit import Kit

__all__ = ["streams"]

LONGEST_SIDE: Final = 700
TILE: Final = 256
SHARE_LEFT_EARLY: Final = 0.15


def streams(kit: Kit, connection: Connection) -> None:
    """Get a photograph in tiles."""
    image = kit.noise.photograph(LONGEST_SIDE)
    tops, lefts = range(0, image.shape[0], TILE), range(0, image.shape[1], TILE)
    places = [(top, left) for top in tops for left in lefts]
    last = kit.chance.randrange(len(places)) if kit.chance.random() < SHARE_LEFT_EARLY else len(places)
    frame_count = kit.chance.randint(1, 6)
    room = {"TILE": TILE * TILE * 3, "PLACE": 8} if kit.chance.random() < 0.7 else None
    held: list[npt.NDArray[Any]] = []
    kit.board.phase = Phase.STREAMING
    stream = connection.caller.stream("frames", {"IMAGE": image}, outputs=room, frames=frame_count)
    are_right, count = True, 0
    with closing(stream):  # type: ignore[type-var]  # it is a generator
        for number in range(last + 1):
            with kit.bounded("the next response of a stream"):
                result = next(stream, None)
            if result is None:
                break
            count += 1
            tile = result["TILE"]
            are_right &= number < len(places) and _is_tile(image, places[number], tile, result["PLACE"])
            if result.overflowed:
                kit.tally.add("done", "overflows")
            held.append(tile)
            del held[: max(len(held) + 1 - frame_count, 0)]  # the model needs a place for the next one
            del result, tile
    are_right &= count == min(last + 1, len(places))
    held.clear()
    if kit.is_checked(connection, "stream", are_right):
        kit.tally.add("done", "streams")
        kit.tally.add("responses of streams", "right", count)
    kit.pass_call()


def _is_tile(image: npt.NDArray[Any], place: tuple[int, int], tile: npt.NDArray[Any], said: npt.NDArray[Any]) -> bool:
    top, left = place
    expected = np.ascontiguousarray(image[top : top + TILE, left : left + TILE])
    return is_right(tile, expected) and is_right(said, np.array(place, np.int32))
