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

SMALLEST_BYTES: Final = 64
LARGEST_BYTES: Final = 1 << 20
IMAGE_SHAPE: Final = (3, 224, 224)
MOST_IMAGES: Final = 2
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
        self._numbers = generator.random(4 * MOST_IMAGES * math.prod(IMAGE_SHAPE), np.float32)

    def words(self, least: int = SMALLEST_BYTES, most: int = LARGEST_BYTES) -> npt.NDArray[np.uint32]:
        """Return this many bytes, every magnitude as likely as any other."""
        nbytes = math.exp(self._random.uniform(math.log(least), math.log(most)))
        return self._slice(self._words, int(nbytes) // 4)

    def rows(self, count: int, most: int = LARGEST_BYTES) -> npt.NDArray[np.uint32]:
        """Return rows of one random width; ``most`` is the size of all in bytes."""
        width = len(self.words(SMALLEST_BYTES, most // count))
        return self._slice(self._words, count * width).reshape(count, width)

    def images(self) -> npt.NDArray[np.float32]:
        """Return a batch of numbers without a NaN, so that arithmetic has one right result."""
        count = self._random.randint(1, MOST_IMAGES)
        return self._slice(self._numbers, count * math.prod(IMAGE_SHAPE)).reshape(count, *IMAGE_SHAPE)

    def photograph(self, longest_side: int) -> npt.NDArray[np.uint8]:
        """Return a picture of random size."""
        height, width = (self._random.randint(1, longest_side) for _ in range(2))
        return self._slice(self._words.view(np.uint8), height * width * 3).reshape(height, width, 3)

    def like(self, payload: Array) -> Array:
        """Return another payload of the same shape and dtype."""
        source: Array = self._numbers if payload.ndim > 2 else self._words
        return np.asarray(self._slice(source, payload.size).view(payload.dtype).reshape(payload.shape))

    def _slice(self, source: Array, length: int) -> Array:
        begin = self._random.randrange(len(source) - length)
        return source[begin : begin + length]


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
        """What the models make of it."""
        every = {**self.parameters, **self.headers}
        said = sorted((name, value) for name, value in every.items() if name.startswith(_PREFIX))
        return zlib.crc32(repr(said).encode())

    @property
    def has_parameters(self) -> bool:
        """Whether there is a parameter that shows in the answer."""
        return any(name.startswith(_PREFIX) for name in self.parameters)

    def without_floats(self) -> Said:
        """Return what a model can say to another one: Triton 2.51 has no floats there."""
        kept = {name: value for name, value in self.parameters.items() if not isinstance(value, float)}
        return Said(kept, self.headers)

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for a client's call."""
        options: dict[str, Any] = {"parameters": dict(self.parameters)} if self.parameters else {}
        return {**options, "headers": dict(self.headers)} if self.headers else options


@dataclass(frozen=True)
class Model:
    """One model and what it does to its input."""

    name: str
    source: str
    sink: str

    def payload(self, noise: Noise, most: int = LARGEST_BYTES) -> Array:
        """Return an input, of at most so many bytes where the model leaves that to its client."""
        if self.name == "multiply":
            return noise.images()
        if self.name == "rows":
            return noise.rows(1)
        payload: Array = noise.words(most=most)
        return payload.view(np.float32) if self.name == "identity" else payload

    def expected(self, payload: Array, said: Said) -> Array:
        """Return what the model makes of an input."""
        if self.name == "multiply":
            return np.asarray(payload * np.float32(2))
        if self.name == "rows":
            return np.invert(payload)
        return np.bitwise_xor(payload, np.uint32(said.number)) if self.reads_parameters else payload

    @property
    def reads_parameters(self) -> bool:
        """Whether what a request says shows in the answer."""
        return self.name in ("halves", "relay", "guests")


MODELS: Final = {
    model.name: model
    for model in (
        Model("identity", "INPUT0", "OUTPUT0"),
        Model("multiply", "INPUT0", "OUTPUT0"),
        Model("halves", "X", "Y"),
        Model("rows", "X", "Y"),
        Model("relay", "X", "Y"),
        Model("guests", "X", "Y"),
    )
}


def is_right(result: Array, expected: Array) -> bool:
    """Return whether two arrays are the same to the byte: NaNs are compared like everything else."""
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return False
    if result.dtype.hasobject:
        return bool(result.tolist() == expected.tolist())
    return bool(np.array_equal(_bytes(result), _bytes(expected)))


class HeldViews:
    """Results that are kept over further calls: their memory must not change as long as somebody looks at it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[tuple[Array, int, int]] = []

    def hold(self, view: Array, call_count: int) -> None:
        """Keep a result for this many calls."""
        if len(self._held) < self._limit:
            self._held.append((view, _checksum(view), call_count))

    def pass_call(self) -> int:
        """Count one more call; return how many of the views whose time is up have changed, and drop these."""
        counted = [(view, checksum, left - 1) for view, checksum, left in self._held]
        self._held = [held for held in counted if held[2] > 0]
        return sum(_checksum(view) != checksum for view, checksum, left in counted if left <= 0)

    def drop(self) -> int:
        """Drop every view; return how many had changed."""
        changed = sum(_checksum(view) != checksum for view, checksum, _ in self._held)
        self._held = []
        return changed


def _checksum(array: Array) -> int:
    return zlib.crc32(_bytes(array).data)


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
