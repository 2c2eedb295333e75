"""Decode random tables and results: nothing may be raised but the error that refuses them, and nothing wrong may pass.

usage: python -m tests.property.fuzz_tables [--count 1000000] [--seed 1]

Each one is a valid one with some bytes changed, or mere bytes under a plausible beginning. Prints what was refused, by
field, and the longest time; anything else that is raised ends it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import random
import re
import struct
import time
from collections.abc import Callable
from typing import Any, Final

from shm_backend_utils.errors import PeerError, TableError
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.spans import MAX_TENSORS, Table

from .random_tables import check_table, random_results, random_table, record_of, results_record

_EDGES: Final = (0, 1, 2, 7, 24, 31, 32, 33, 64, 65, 255, 512, 513, 1023, 1024, 2047, 2048, 4096, 8191, 8192, 65535)
_LARGE: Final = (*_EDGES, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
_CORPUS_SIZE: Final = 500
_LARGE_ONES: Final = 5
_MOST_CHECKED: Final = 50


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


def fuzz(
    count: int,
    rng: random.Random,
    corpus: list[tuple[bytes, int, int, Any]],
    decode: Callable[[bytes, Any], object],
    check: Callable[[Any, Any], None],
) -> None:
    """Decode so many, and print what came of it."""
    reasons: collections.Counter[str] = collections.Counter()
    slowest: list[tuple[int, bytes, Any]] = []
    limit = 0
    begin = time.perf_counter()
    for _ in range(count):
        data, first, length, known = rng.choice(corpus)
        data = mutated(rng, data, first, length)
        found: Any = None
        started = time.perf_counter_ns()
        try:
            found = decode(data, known)
            took = time.perf_counter_ns() - started
            reasons[""] += 1
        except (TableError, PeerError) as error:
            took = time.perf_counter_ns() - started
            reasons[_reason(error)] += 1
        if took > limit:
            slowest.append((took, data, known))
            if len(slowest) > 200:
                slowest = sorted(slowest, key=lambda each: each[0])[100:]
                limit = slowest[0][0]
        if found is not None:
            check(found, known)
    elapsed = time.perf_counter() - begin
    accepted = reasons.pop("", 0)
    print(f"  {count} in {elapsed:.1f} s: {accepted} accepted, {count - accepted} refused")
    longest = max(min(_time_of(decode, data, known) for _ in range(5)) for _, data, known in slowest)
    print(f"  the longest took {longest / 1000:.0f} us")
    for reason, number in reasons.most_common():
        print(f"  {number:9}  {reason}")


def _time_of(decode: Callable[[bytes, Any], object], data: bytes, known: Any) -> int:
    """Measure it again: what took long the first time may have been interrupted."""
    started = time.perf_counter_ns()
    with contextlib.suppress(TableError, PeerError):
        decode(data, known)
    return time.perf_counter_ns() - started


def _reason(error: TableError | PeerError) -> str:
    if isinstance(error, TableError):
        return re.sub("[0-9]+", "N", re.sub(r"^outputs\.(?s:.*)", "outputs.NAME", error.field))
    return re.sub("[0-9]+", "N", str(error).split(": ", 1)[1].rpartition(";")[0])


def _check_table(found: tuple[int, Table], known: tuple[int, int]) -> None:
    if len(found[1].inputs) + len(found[1].outputs) <= _MOST_CHECKED:
        check_table(found[1], *known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    gc.disable()  # its pauses are none of the decoders' time

    samples = [random_table(rng, MAX_TENSORS if index < _LARGE_ONES else None) for index in range(_CORPUS_SIZE)]
    corpus: list[tuple[bytes, int, int, Any]] = []
    for sample in samples:
        record = record_of(sample)
        corpus.append((record, 8, struct.unpack_from("<I", record, 8)[0], (sample.data_begin, sample.byte_size)))
    print("tables")
    fuzz(arguments.count, rng, corpus, lambda data, known: table.decode(data, *known), _check_table)

    corpus = []
    for found, byte_sizes in [random_results(rng) for _ in range(_CORPUS_SIZE)]:
        half = results_record(found)
        corpus.append((half, 16, struct.unpack_from("<I", half, 16)[0], byte_sizes))
    print("results")
    fuzz(arguments.count, rng, corpus, results.decode, lambda found, known: None)


if __name__ == "__main__":
    main()
