"""What every workload of a client process works with: its clients, its dice, its checks and its counts."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy.typing as npt

from shm_backend_utils.client import Result

from .board import Board, Phase
from .checks import HeldViews, is_right
from .connections import Connection, Connections
from .models import Model, Noise, Said
from .tally import Tally

__all__ = ["CALL_TIMEOUT_S", "Kit"]

CALL_TIMEOUT_S: Final = 15.0
GRACE_S: Final = 1.0
"""How much longer than its timeout a call may take."""
MOST_HELD_VIEWS: Final = 4
SLEEPS_MS: Final = (*[0] * 38, 1, 40)
SHARE_OF_HINTS: Final = 0.8
SHARE_OF_SMALL_HINTS: Final = 0.1
SHARE_HELD: Final = 0.3


class Kit:
    """Of one client process.

    Attributes
    ----------
    urls : dict of str to str
        ``"grpc"`` and ``"http"``.
    connections : Connections
    chance : random.Random
    noise : Noise
    board : Board
    tally : Tally
    held : HeldViews
    """

    def __init__(self, urls: dict[str, str], seed: int, board: Board) -> None:
        self.urls = urls
        self.chance = random.Random(seed)
        self.connections = Connections(urls, CALL_TIMEOUT_S, self.chance)
        self.noise = Noise(seed)
        self.board = board
        self.tally = Tally()
        self.held = HeldViews(MOST_HELD_VIEWS)
        self._last_shapes: dict[str, tuple[int, ...]] = {}

    def said(self, model: Model) -> Said:
        """Return what a request says beside its tensors."""
        return Said.random(self.chance, self.chance.choice(SLEEPS_MS)) if model.reads_parameters else Said()

    def room(self, name: str, byte_size: int) -> dict[str, int] | None:
        """Say how large an output is, say too little, or leave it to be learned."""
        share = self.chance.random()
        if share < SHARE_OF_SMALL_HINTS:
            return {name: max(byte_size // 2, 1)}
        return {name: byte_size} if share < SHARE_OF_HINTS else None

    @contextlib.contextmanager
    def bounded(self, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Iterator[None]:
        """Count the call in this block if it takes a second longer than its timeout."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            if took > timeout_s + GRACE_S:
                self.tally.add("late calls", f"{what}: {took:.1f} s of {timeout_s:g} s")

    def check(
        self, connection: Connection, model: Model, payload: npt.NDArray[Any], said: Said, result: Result, way: str
    ) -> npt.NDArray[Any]:
        """Check a result, and count it and what the call was like; return the output."""
        self.board.phase = Phase.READING
        view = result[model.sink]
        self.tally.add("paths", f"{result.path}, overflowed" if result.overflowed else result.path)
        if not self.is_checked(connection, way, is_right(view, model.expected(payload, said))):
            return view
        words = ["overflows"] if result.overflowed else []
        words += ["parameters"] if said.has_parameters else []
        words += ["headers"] if said.headers else []
        words += ["small calls"] if result.path == "inline" else []
        if result.path == "direct":
            words += ["sealed memory" if connection.has_sealed_memory(model.name) else "memory in /dev/shm"]
        words += ["forward"] if model.name == "relay" else []
        words += ["varying shapes"] if self._last_shapes.get(model.name, payload.shape) != payload.shape else []
        self._last_shapes[model.name] = payload.shape
        for word in words:
            self.tally.add("done", word)
        return view

    def is_checked(self, connection: Connection, way: str, is_right: bool) -> bool:
        """Count an answer that was checked; return whether it was right."""
        self.checked(f"{connection.kind}, {connection.protocol}, {way}", is_right)
        if connection.is_lost:
            connection.is_lost = False
            self.tally.add("recoveries", f"{connection.kind}, {connection.protocol}")
        if is_right:
            for word in (connection.kind, connection.protocol, way):
                self.tally.add("done", word)
        return is_right

    def checked(self, name: str, is_right: bool) -> None:
        """Count an answer under any name."""
        self.tally.add("requests", name)
        if is_right:
            self.board.verified += 1
        else:
            self.tally.add("wrong bytes", f"a result, {name}")

    def pass_call(self, view: npt.NDArray[Any] | None = None) -> None:
        """Check what is held, and maybe hold a view of which nobody writes over the memory."""
        self.tally.add("wrong bytes", "a view that was held", self.held.pass_call())
        if view is not None and self.chance.random() < SHARE_HELD:
            self.held.hold(view, self.chance.randint(1, 40))
