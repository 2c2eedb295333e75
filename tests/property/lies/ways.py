"""The ways by which lies reach a client or a model: each call of one is a lie told, and what came of it checked."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions, ShmClient, client
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.errors import SlotInDoubtError

from .liars import LyingTransport
from .said import HINTS, check_array

__all__ = ["Path", "Prepared", "Stream", "Way", "Whole", "X"]

X: Final = np.arange(4, dtype=np.float32).reshape(4, 1)
_AGAIN: Final = 200  # lies until what was prepared is prepared anew
_FRAMES: Final = 50
Path = Literal["direct", "triton-shm", "inline"]


class Way(ABC):
    share = 1.0

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    @abstractmethod
    def tell(self) -> str:
        """Tell one lie; return what came of it: ``"right"``, or the error's class. Raise what must not be."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what there is."""


class _OfClient(Way):
    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance)
        self._path = path
        self._transport = LyingTransport(protocol, chance)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "connect", lambda *_: self._transport)
            self._client = ShmClient("localhost:1", pool=PoolOptions(region="system", max_bytes=1 << 24))

    @contextlib.contextmanager
    def _lying(self) -> Iterator[None]:
        self._transport.is_lying = True
        try:
            yield
        finally:
            self._transport.is_lying = False
            self._transport.server.orders.clear()

    def close(self) -> None:
        self._client.close()
        self._transport.server.close()


class Prepared(_OfClient):
    share = 40.0

    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance, path, protocol)
        self._left = 0
        self._call: Any = None

    def tell(self) -> str:
        if self._left == 0:
            self.end_call()
            hints = HINTS if self._path != "inline" else list(HINTS)
            self._call = self._client.prepare("m", {"X": ((4, 1), "float32")}, outputs=hints, path=self._path)
            self._left = _AGAIN
        self._left -= 1
        try:
            with self._lying():
                return checked(self._call.infer())
        except SlotInDoubtError:
            self._left = 0
            raise
        except InferenceError:
            self._left = 0  # its memory may be lost, by what the server says
            raise

    def end_call(self) -> None:
        if self._call is not None:
            self._call.close()

    def close(self) -> None:
        self.end_call()
        super().close()


class Whole(_OfClient):
    share = 2.0

    def tell(self) -> str:
        hints = None if self._path == "inline" else HINTS
        self._client.explain("m")
        with self._lying():
            return checked(self._client.infer("m", {"X": X}, outputs=hints, path=self._path))


class Stream(_OfClient):
    """Frames of streams, each of which ends with the first lie that is found."""

    share = 4.0

    def __init__(self, chance: random.Random, path: Path, protocol: str) -> None:
        super().__init__(chance, path, protocol)
        self._frames: Any = None
        self._left = 0

    def tell(self) -> str:
        if self._left == 0:
            self._end_stream()
            self._frames = self._client.stream("frames", {"X": X}, outputs=HINTS, path=self._path)
            self._left = _FRAMES
        self._left -= 1
        try:
            return checked(next(self._frames))
        except BaseException:
            self._left = 0
            raise

    def _end_stream(self) -> None:
        if self._frames is not None:
            self._frames.close()

    def close(self) -> None:
        self._end_stream()
        super().close()


def checked(result: Mapping[str, Any]) -> str:
    """Return ``"right"`` for a result that may be; raise AssertionError for another."""
    for name, array in result.items():
        check_array(name, array)
        if array.flags.writeable and array.size and not array.dtype.hasobject:
            array[...] = array
    return "right"
