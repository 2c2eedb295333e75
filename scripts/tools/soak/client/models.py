"""The models that the soak calls with numbers: their inputs, their right results, and whether a result is one."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LARGEST_BYTES: Final = 1 << 20
IMAGE_SHAPE: Final = (3, 224, 224)
MOST_ROWS: Final = 4
"""The ``max_batch_size`` of the model ``rows``."""

Array = npt.NDArray[Any]
_PREFIX: Final = "soak-"


class Noise:
    """Random words, made once; payloads are slices of them, which costs nothing."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        generator = np.random.default_rng(seed)
        self._words = generator.integers(0, 1 << 32, LARGEST_BYTES, dtype=np.uint32)
        self._numbers = generator.random(8 * math.prod(IMAGE_SHAPE), np.float32)

    def words(self, most: int = LARGEST_BYTES) -> Array:
        """Return up to so many bytes, every magnitude from 64 on as likely as any other."""
        nbytes = math.exp(self._random.uniform(math.log(64), math.log(most)))
        return self._slice(self._words, (int(nbytes) // 4,))

    def rows(self, count: int, most: int = LARGEST_BYTES) -> Array:
        """Return rows of one random width; ``most`` is the size of all in bytes."""
        return self._slice(self._words, (count, len(self.words(most // count))))

    def images(self) -> Array:
        """Return a batch of numbers without a NaN, so that arithmetic has one right result."""
        return self._slice(self._numbers, (self._random.randint(1, 2), *IMAGE_SHAPE))

    def photograph(self, longest_side: int) -> Array:
        height, width = (self._random.randint(1, longest_side) for _ in range(2))
        return self._slice(self._words.view(np.uint8), (height, width, 3))

    def like(self, payload: Array) -> Array:
        return self._slice(self._numbers if payload.ndim > 2 else self._words, payload.shape).view(payload.dtype)

    def _slice(self, source: Array, shape: tuple[int, ...]) -> Array:
        begin = self._random.randrange(len(source) - math.prod(shape))
        return source[begin : begin + math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class Said:
    """What a request says beside its tensors. All of it is in what the models ``halves`` and ``relay`` answer."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # the server hands them to the model as parameters

    @classmethod
    def random(cls, chance: random.Random, sleep_ms: int = 0) -> Said:
        """Return parameters of every type, or fewer, and a header, or none."""
        values = {
            f"{_PREFIX}word": f"{chance.getrandbits(64):x} ü",
            f"{_PREFIX}number": chance.getrandbits(63) - (1 << 62),
            f"{_PREFIX}share": chance.randrange(1 << 20) + 0.5,
            f"{_PREFIX}flag": chance.random() < 0.5,
        }
        parameters = {name: value for name, value in values.items() if chance.random() < 0.3}
        headers = {f"{_PREFIX}mark": f"{chance.getrandbits(32):x}"} if chance.random() < 0.3 else {}
        return cls({**parameters, "sleep_ms": sleep_ms}, headers)

    @property
    def number(self) -> int:
        every = {**self.parameters, **self.headers}
        said = sorted((name, value) for name, value in every.items() if name.startswith(_PREFIX))
        return zlib.crc32(repr(said).encode())

    def to_another_model(self, *, copies: bool) -> Said:
        """Return what the model ``relay`` can say to another one: Triton 2.51 has no floats there."""
        kept = {name: value for name, value in self.parameters.items() if not isinstance(value, float)}
        return Said({**kept, "copies": copies}, self.headers)


_TENSORS: Final = {
    **dict.fromkeys(("identity", "multiply"), ("INPUT0", "OUTPUT0")),
    **dict.fromkeys(("halves", "rows", "relay", "guests"), ("X", "Y")),
}
"""The names of each model's input and output."""
_READ_PARAMETERS: Final = ("halves", "relay", "guests")
"""By the answers of these one sees what a request says."""


@dataclass(frozen=True)
class Request:
    model: str
    payload: Array
    said: Said = field(default_factory=Said)
    room: Mapping[str, int] | None = None

    @classmethod
    def random(cls, model: str, noise: Noise, chance: random.Random, most: int = LARGEST_BYTES) -> Request:
        """Return one, of at most so many bytes where the model leaves that to its client."""
        said = Said.random(chance, chance.choice((*[0] * 398, 1, 40))) if model in _READ_PARAMETERS else Said()
        if model == "multiply":
            return cls(model, noise.images(), said)
        if model == "rows":
            return cls(model, noise.rows(1, most), said)
        return cls(model, noise.words(most).view(np.float32 if model == "identity" else np.uint32), said)

    @property
    def source(self) -> str:
        return _TENSORS[self.model][0]

    @property
    def sink(self) -> str:
        return _TENSORS[self.model][1]

    @property
    def inputs(self) -> tuple[str, dict[str, Array]]:
        return self.model, {self.source: self.payload}

    @property
    def layout(self) -> tuple[str, dict[str, Any]]:
        return self.model, {self.source: (self.payload.shape, self.payload.dtype)}

    @property
    def options(self) -> dict[str, Any]:
        said = {"parameters": dict(self.said.parameters), "headers": dict(self.said.headers)}
        return {"outputs": self.room, **{name: value for name, value in said.items() if value}}

    @property
    def expected(self) -> Array:
        if self.model == "multiply":
            return np.asarray(self.payload * np.float32(2))
        if self.model == "rows":
            return np.invert(self.payload)
        if self.model in _READ_PARAMETERS:
            return np.asarray(np.bitwise_xor(self.payload, np.uint32(self.said.number)))
        return self.payload


def is_right(result: Array, expected: Array) -> bool:
    """Return whether two arrays are the same to the byte: NaNs are compared like everything else."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    if result.dtype.hasobject:
        return bool(result.tolist() == expected.tolist())
    return bool(np.array_equal(_bytes(result), _bytes(expected)))


class HeldViews:
    """Results that are kept during further calls: their memory must not change while a view of it exists."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[tuple[Array, int, int]] = []

    def hold(self, view: Array, call_count: int) -> None:
        if len(self._held) < self._limit:
            self._held.append((view, _checksum(view), call_count))

    def pass_calls(self, count: int = 1) -> int:
        """Count further calls; return how many of the views whose time is up have changed, and drop these."""
        counted = [(view, checksum, left - count) for view, checksum, left in self._held]
        self._held = [held for held in counted if held[2] > 0]
        return sum(_checksum(view) != checksum for view, checksum, left in counted if left <= 0)


def _checksum(array: Array) -> int:
    return zlib.crc32(_bytes(array).data)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
