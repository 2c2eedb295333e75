"""Broken tables and results by the thousand, and what a decoder makes of them."""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shm_backend_utils.errors import PeerError, TableError

__all__ = ["Outcome", "Valid", "fuzzed", "mutated"]

_EDGES: Final = (0, 1, 2, 7, 24, 31, 32, 33, 64, 65, 255, 512, 513, 1023, 1024, 2047, 2048, 4096, 8191, 8192, 65535)
_LARGE: Final = (*_EDGES, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
_SLOWEST: Final = 100


class Valid(NamedTuple):
    """Bytes that a decoder takes: where the part that is to be broken begins and ends, and what the decoder is told."""

    data: bytes
    begin: int
    end: int
    known: Any


@dataclass
class Outcome:
    """What came of it: how many were accepted, how many refused for which reason, by which errors, the longest time.

    Of the errors there is one for each reason and class. Times are the processor's, and those of the largest valid ones
    tell how busy the machine is.
    """

    accepted: int = 0
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: dict[tuple[str, type[Exception]], TableError | PeerError] = field(default_factory=dict)
    longest_s: float = 0.0
    longest_of_valid_s: float = 0.0


def mutated(rng: random.Random, data: bytes, begin: int, length: int) -> bytes:
    """Return data with one to four fields changed, from ``begin`` to ``length``, or with mere bytes behind its head."""
    changed = bytearray(data)
    if rng.random() < 0.02:
        changed[begin + 24 : length] = rng.randbytes(max(0, length - begin - 24))
        return bytes(changed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size = rng.choice((1, 2, 2, 4, 8, 8))
        at = rng.randrange(begin, max(begin + 8, length)) & -size
        value = rng.choice(_EDGES if size < 4 else _LARGE) % (1 << 8 * size)
        if rng.random() < 0.3:
            old = int.from_bytes(changed[at : at + size], "little")
            value = (old + rng.choice((-256, -8, -1, 1, 8, 256))) % (1 << 8 * size)
        elif rng.random() < 0.1:
            value = rng.getrandbits(8 * size)
        changed[at : at + size] = value.to_bytes(size, "little")
    return bytes(changed)


def fuzzed(
    count: int,
    rng: random.Random,
    valid: Sequence[Valid],
    decode: Callable[[bytes, Any], Any],
    check: Callable[[Any, Any], None],
) -> Outcome:
    outcome = Outcome()
    slowest: list[tuple[int, bytes, Any]] = []
    limit = 0
    with _without_collector():  # its pauses are none of the decoder's time
        for _ in range(count):
            one = rng.choice(valid)
            data = mutated(rng, one.data, one.begin, one.end)
            found: Any = None
            started = time.thread_time_ns()
            try:
                found = decode(data, one.known)
                took = time.thread_time_ns() - started
            except (TableError, PeerError) as error:
                took = time.thread_time_ns() - started
                reason = _reason(error)
                outcome.reasons[reason] += 1
                outcome.errors[reason, type(error)] = error
            if found is not None:
                outcome.accepted += 1
                check(found, one.known)
            if took > limit:
                slowest.append((took, data, one.known))
                if len(slowest) > 2 * _SLOWEST:
                    slowest = sorted(slowest, key=lambda each: each[0])[-_SLOWEST:]
                    limit = slowest[0][0]
        # Measured again: what took long the first time may have been interrupted.
        outcome.longest_s = max(_time_of(decode, data, known) for _, data, known in slowest)
        largest = sorted(valid, key=lambda each: each.end)[-_SLOWEST // 10 :]
        outcome.longest_of_valid_s = max(_time_of(decode, each.data, each.known) for each in largest)
    return outcome


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _time_of(decode: Callable[[bytes, Any], object], data: bytes, known: Any) -> float:
    times = []
    for _ in range(5):
        started = time.thread_time_ns()
        with contextlib.suppress(TableError, PeerError):
            decode(data, known)
        times.append(time.thread_time_ns() - started)
    return min(times) / 1e9


def _reason(error: TableError | PeerError) -> str:
    """Return the field of a table; of results what is said of them, without the numbers."""
    if isinstance(error, TableError):
        return re.sub("[0-9]+", "N", re.sub(r"^outputs\.(?s:.*)", "outputs.NAME", error.field))
    return re.sub("[0-9]+", "N", str(error).split(": ", 1)[1].rpartition(";")[0])
