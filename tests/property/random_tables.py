"""Tables and results at random, valid or broken, for property tests and fuzzing; and a check of what is decoded."""

from __future__ import annotations

import collections
import contextlib
import gc
import heapq
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from shm_backend_utils import dtypes
from shm_backend_utils.dtypes import BYTES, LENGTH_SIZE, DType
from shm_backend_utils.errors import PeerError, TableError
from shm_backend_utils.protocol import layout, results, table
from shm_backend_utils.protocol.claims import (
    CudaDescriptorClaim,
    CudaRegionClaim,
    LentRegionClaim,
    NamedRegionClaim,
    RegionClaim,
    claimed_size,
)
from shm_backend_utils.protocol.results import OutputPlace, Results
from shm_backend_utils.protocol.spans import MAX_FRAMES, InputSpan, OutputSpan, Ring, Table

MAX_GENERATION: Final = 2**63 - 1
_DTYPES: Final = tuple(dtypes.BY_NAME.values())
_LETTERS: Final = "ABCxyz_019.:/ é你😀\n"


class Sample(NamedTuple):
    """A table, and what a decoder needs to know of the region that it is for."""

    table: Table
    data_begin: int
    byte_size: int


def random_table(rng: random.Random, tensor_count: int | None = None) -> Sample:
    """Return a table that keeps every rule: tensors of all kinds, further regions, sometimes a ring.

    It has about so many tensors, or a few.
    """
    data_begin = layout.data_offset(rng.randint(1, 8), layout.PAGE_SIZE)
    byte_size = data_begin + rng.randint(1, 32) * layout.PAGE_SIZE
    regions = _random_regions(rng)
    ends = [byte_size] + [min(claimed_size(region), 2**50) for region in regions]
    cursors = [data_begin] + [rng.choice([0, end // 2]) for end in ends[1:]]
    names = _random_names(rng, rng.choice([0, 1, 2, 3, 8, 20]) if tensor_count is None else tensor_count)
    inputs: dict[str, InputSpan] = {}
    for name in names[::2]:
        dtype = rng.choice(_DTYPES)
        shape = _random_shape(rng)
        nbytes = math.prod(shape) * (dtype.itemsize or LENGTH_SIZE) + (rng.randint(0, 30) if dtype is BYTES else 0)
        region = rng.randrange(len(ends))
        offset = cursors[region] + rng.choice([0, 0, 1, 256])
        if offset + nbytes <= ends[region]:
            inputs[name] = InputSpan(dtype, shape, region, offset, nbytes)
            if rng.random() < 0.9:  # else the next one overlaps it
                cursors[region] = offset + nbytes
    cursors = [max([cursor, *_ends_of(inputs, region)]) for region, cursor in enumerate(cursors)]
    begins = list(cursors)
    outputs: dict[str, OutputSpan] = {}
    for name in names[1::2]:
        region = rng.randrange(len(ends))
        offset, room = cursors[region] + rng.choice([0, 0, 1, 256]), rng.choice([0, 1, 4, 100, 5000])
        if offset + room <= ends[region]:
            outputs[name] = OutputSpan(region, offset, room)
            cursors[region] = offset + room
    ring = None
    if rng.random() < 0.3:
        stride = max([end - begin for begin, end in zip(begins, cursors, strict=True)]) + rng.choice([0, 0, 1, 256])
        frames = rng.choice([1, 2, 3, MAX_FRAMES])
        if all(cursor + (frames - 1) * stride <= end for cursor, end in zip(cursors, ends, strict=True)):
            ring = Ring(rng.randint(0, layout.MAX_SLOT_COUNT - frames), frames, stride)
    return Sample(Table(inputs, outputs, regions, ring), data_begin, byte_size)


def random_results(rng: random.Random) -> tuple[Results, list[int]]:
    """Return results that keep every rule, and the sizes of the request's regions."""
    byte_sizes = [rng.choice([4096, 2**20, 2**40]) for _ in range(rng.randint(1, 4))]
    outputs = []
    for name in _random_names(rng, rng.choice([0, 1, 2, 3, 8])):
        dtype, shape = rng.choice(_DTYPES), _random_shape(rng)
        nbytes = math.prod(shape) * (dtype.itemsize or LENGTH_SIZE)
        region = rng.randrange(len(byte_sizes))
        room = byte_sizes[region] - nbytes
        if room < 0 or rng.random() < 0.2:
            outputs.append(OutputPlace(name, dtype, shape, 0, 0, 0, is_in_response=True))
        else:
            offset = rng.randint(0, room) // (dtype.itemsize or 1) * (dtype.itemsize or 1)
            outputs.append(OutputPlace(name, dtype, shape, region, offset, nbytes, is_in_response=False))
    further = range(1, len(byte_sizes))
    events = rng.sample(further, min(len(further), rng.choice([0, 0, 0, 1, 2])))
    return Results(tuple(outputs), tuple(events)), byte_sizes


def record_of(sample: Sample, generation: int = 1) -> bytes:
    encoded = generation.to_bytes(8, "little") + table.encode(sample.table)
    return encoded.ljust(max(layout.PAGE_SIZE // 2, len(encoded)), b"\0")


def results_record(found: Results) -> bytes:
    encoded = (1).to_bytes(8, "little") * 2 + results.encode(found.outputs, found.events)
    return encoded.ljust(max(layout.PAGE_SIZE // 2, len(encoded)), b"\0")


def check_table(found: Table, data_begin: int, byte_size: int) -> None:
    """Raise AssertionError if a decoded table breaks a rule; tells it in the slow and obvious way."""
    limits = [range(data_begin, byte_size + 1)] + [range(claimed_size(region) + 1) for region in found.regions]
    taken: list[tuple[int, int, int]] = []
    for name, each in found.inputs.items():
        assert name
        assert each.offset in limits[each.region]
        assert each.offset + each.byte_size in limits[each.region]
        _check_array(each.dtype, each.shape, each.byte_size)
        if each.byte_size:
            taken.append((each.region, each.offset, each.offset + each.byte_size))
    ring = found.ring or Ring(0, 1, 0)
    assert 1 <= ring.frames <= MAX_FRAMES
    assert ring.slot + ring.frames <= layout.MAX_SLOT_COUNT
    for place in range(ring.frames):
        for name, room in ring.outputs(found.outputs, place).items():
            assert name
            assert room.offset in limits[room.region]
            assert room.offset + room.byte_size in limits[room.region]
            begin, end = room.offset, room.offset + room.byte_size
            if begin < end:
                assert not any(region == room.region and begin < last and first < end for region, first, last in taken)
                taken.append((room.region, begin, end))


def _check_array(dtype: DType, shape: tuple[int, ...], byte_size: int) -> None:
    count = math.prod(shape)
    if dtype is BYTES:
        assert count * LENGTH_SIZE <= byte_size
    else:
        assert count * dtype.itemsize == byte_size
    if count < 2**16:
        np.empty(shape, dtype.numpy)


def _random_regions(rng: random.Random) -> tuple[RegionClaim, ...]:
    regions: list[RegionClaim] = []
    for number in range(rng.choice([0, 0, 0, 1, 2, 4])):
        kind = rng.choice(["lent", "cuda", "named", "descriptor"])
        lent = [n for n, each in enumerate(regions, 1) if isinstance(each, LentRegionClaim)]
        fence = rng.choice([None, 0, *lent])
        size = rng.choice([1, 4096, 2**20, 2**63 - 1])
        if kind == "lent":
            key = f"shmbu-{number}-{rng.randrange(2**63):x}"
            regions.append(LentRegionClaim(key, size, rng.randbytes(16).hex(), rng.randrange(1024)))
        elif kind == "cuda":
            handle, uuid = bytes([number]) + rng.randbytes(63), rng.randbytes(16).hex()
            is_lent = fence is not None and rng.random() < 0.3
            regions.append(CudaRegionClaim(handle, size, uuid, fence, rng.random() < 0.5, is_lent))
        elif kind == "descriptor":
            key, (token, uuid) = f"shmbu-fd-{number:032x}-1", (rng.randbytes(16).hex() for _ in range(2))
            regions.append(CudaDescriptorClaim(key, size, token, uuid, fence or 0, rng.random() < 0.5))
        else:
            regions.append(NamedRegionClaim(f"region {number} é"))
    return tuple(regions)


def _random_names(rng: random.Random, count: int) -> list[str]:
    return list({"".join(rng.choices(_LETTERS, k=rng.choice([1, 3, 8, 40]))) for _ in range(count)})


def _random_shape(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.05:
        return (1,) * table.MAX_RANK
    return tuple([rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(rng.choice([0, 1, 2, 4]))])


def _ends_of(inputs: dict[str, InputSpan], region: int) -> list[int]:
    return [span.offset + span.byte_size for span in inputs.values() if span.region == region]


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
    slowest: list[tuple[int, int, bytes, Any]] = []
    gc.disable()  # its pauses are none of the decoder's time
    for number in range(count):
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
        if len(slowest) < _SLOWEST:
            heapq.heappush(slowest, (took, number, data, one.known))
        else:
            heapq.heappushpop(slowest, (took, number, data, one.known))
    # Measured again: what took long the first time may have been interrupted.
    outcome.longest_s = max(_time_of(decode, data, known) for *_, data, known in slowest)
    largest = sorted(valid, key=lambda each: each.end)[-_SLOWEST // 10 :]
    outcome.longest_of_valid_s = max(_time_of(decode, each.data, each.known) for each in largest)
    gc.enable()
    return outcome


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
