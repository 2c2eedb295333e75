"""What holds for every table and all results, not only for those that somebody thought of."""

from __future__ import annotations

import random
import struct
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils import dtypes
from shm_backend_utils.errors import PeerError, TableError
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.claims import CudaRegionClaim, LentRegionClaim
from shm_backend_utils.protocol.results import Results
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from tests.property.fuzz_tables import mutated
from tests.property.random_tables import Sample, check_table, random_results, random_table, record_of, results_record

UINT8: Final = dtypes.BY_NAME["UINT8"]
HEAD: Final = table.HEAD_LENGTH

randoms = st.randoms(use_true_random=False)
samples = st.builds(random_table, randoms)
found_results = st.builds(random_results, randoms)
generations = st.integers(1, 2**63 - 1)


def decoded_or_refused(data: bytes, data_begin: int, byte_size: int) -> Table | None:
    """Decode and check; None for what is refused. Everything else that is raised fails the test."""
    message = ""
    try:
        _, found = table.decode(data, data_begin, byte_size)
    except TableError as error:
        message = f"{error.code}: {error}"
    if message:
        assert message.startswith("shm:table: ")
        assert len(message.encode()) < 500
        return None
    check_table(found, data_begin, byte_size)
    return found


def results_or_refused(data: bytes, byte_sizes: list[int]) -> Results | None:
    try:
        return results.decode(data, byte_sizes)
    except PeerError:
        return None


@given(samples, generations)
def test_what_is_encoded_is_decoded(sample: Sample, generation: int) -> None:
    if sample.table.ring is not None:
        generation %= 2**32
    record = record_of(sample, generation)
    assert table.decode(record, sample.data_begin, sample.byte_size) == (generation, sample.table)
    check_table(*sample)


@given(samples)
def test_a_table_says_how_long_it_is(sample: Sample) -> None:
    encoded = table.encode(sample.table)
    assert struct.unpack_from("<I", encoded)[0] == 8 + len(encoded)


@given(samples, st.binary(max_size=64))
def test_what_lies_behind_a_table_means_nothing(sample: Sample, rest: bytes) -> None:
    data = bytes(8) + table.encode(sample.table) + rest
    assert table.decode(data, sample.data_begin, sample.byte_size)[1] == sample.table


@given(found_results)
def test_results_that_are_encoded_are_decoded(sample: tuple[Results, list[int]]) -> None:
    found, byte_sizes = sample
    record = results_record(found)
    assert results.decode(record, byte_sizes) == found._replace(completed=1)
    encoded = results.encode(found.outputs, found.events)
    assert struct.unpack_from("<I", encoded)[0] == 16 + len(encoded)


@given(st.binary(min_size=HEAD, max_size=4096), st.integers(1, 2**20), st.integers(1, 2**20))
def test_any_bytes_are_decoded_or_refused(data: bytes, data_begin: int, data_size: int) -> None:
    decoded_or_refused(data, data_begin, data_begin + data_size)
    results_or_refused(data, [data_size])


@given(samples, st.integers(HEAD, 400), randoms)
def test_any_bytes_behind_a_plausible_head_are_read_or_refused(sample: Sample, length: int, rng: random.Random) -> None:
    head = bytearray(record_of(sample)[:HEAD])
    head[8:12] = struct.pack("<I", length)
    decoded_or_refused(bytes(head) + rng.randbytes(2048 - HEAD), sample.data_begin, sample.byte_size)


@given(samples, st.data())
def test_another_length_is_refused(sample: Sample, data: st.DataObject) -> None:
    record = bytearray(record_of(sample))
    (length,) = struct.unpack_from("<I", record, 8)
    wrong = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value != length) | st.integers(0, length - 1))
    struct.pack_into("<I", record, 8, wrong)
    assert decoded_or_refused(bytes(record), sample.data_begin, sample.byte_size) is None


@given(samples, randoms)
def test_no_message_holds_a_secret(sample: Sample, rng: random.Random) -> None:
    record = record_of(sample)
    secrets = []
    for claim in sample.table.regions:
        if isinstance(claim, LentRegionClaim):
            secrets += [claim.key, claim.token]
        elif isinstance(claim, CudaRegionClaim):
            secrets += [repr(claim.handle)[2:-1], claim.handle.hex(), claim.device_uuid]
    for _ in range(10):
        message = ""
        try:
            changed = mutated(rng, record, 8, struct.unpack_from("<I", record, 8)[0])
            table.decode(changed, sample.data_begin, sample.byte_size)
        except TableError as error:
            message = str(error)
        assert not any(secret in message for secret in secrets)


small_spans = st.tuples(st.integers(0, 1), st.integers(0, 20), st.integers(0, 8))
rings = st.none() | st.builds(Ring, st.just(1), st.integers(1, 4), st.integers(0, 12))


@given(st.lists(small_spans, max_size=5), st.lists(small_spans, max_size=5), rings)
def test_outputs_that_overlap_anything_are_refused_and_nothing_else_is(
    inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]], ring: Ring | None
) -> None:
    lent = LentRegionClaim("shmbu-1", 100, "0" * 32, 0)
    written = Table(
        {
            f"I{index}": InputSpan(UINT8, (size,), region, offset, size)
            for index, (region, offset, size) in enumerate(inputs)
        },
        {f"O{index}": OutputSpan(*span) for index, span in enumerate(outputs)},
        (lent,),
        ring,
    )
    places = [[(region, offset, size) for region, offset, size in outputs]]
    if ring is not None:
        places = [
            [(region, offset + place * ring.stride, size) for region, offset, size in outputs]
            for place in range(ring.frames)
        ]
    spans = [span for place in places for span in place]
    is_wrong = any(
        share_a_byte(output, other) for index, output in enumerate(spans) for other in [*inputs, *spans[:index]]
    ) or (ring is not None and (interlock(outputs, ring) or lies_in_ring(inputs, outputs, ring)))
    found = decoded_or_refused(record_of(Sample(written, 0, 100)), 0, 100)
    assert (found is None) == is_wrong


def share_a_byte(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Tell it in the slow and obvious way."""
    (region, offset, size), (other_region, other_offset, other_size) = one, other
    bytes_of_one = set(range(offset, offset + size))
    return region == other_region and bool(bytes_of_one & set(range(other_offset, other_offset + other_size)))


def bytes_of(spans: list[tuple[int, int, int]], region: int) -> list[int]:
    return [byte for where, offset, size in spans if where == region for byte in range(offset, offset + size)]


def interlock(outputs: list[tuple[int, int, int]], ring: Ring) -> bool:
    """Tell whether a place of a ring takes more bytes of a region than there are up to the next place."""
    places = [taken for region in (0, 1) if (taken := bytes_of(outputs, region))]
    return ring.frames > 1 and any(max(taken) + 1 - min(taken) > ring.stride for taken in places)


def lies_in_ring(inputs: list[tuple[int, int, int]], outputs: list[tuple[int, int, int]], ring: Ring) -> bool:
    """Tell whether an input has bytes between a ring's first byte and its last."""
    for region in (0, 1):
        taken = bytes_of(outputs, region)
        if taken:
            first, last = min(taken), max(taken) + (ring.frames - 1) * ring.stride
            if any(first <= byte <= last for byte in bytes_of(inputs, region)):
                return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_a_table_of_the_largest_size_is_decoded(seed: int) -> None:
    sample = random_table(random.Random(seed), 512)
    assert table.decode(record_of(sample), sample.data_begin, sample.byte_size)[1] == sample.table


@given(samples, samples, st.data())
def test_a_table_that_changes_as_it_is_copied_is_no_harm(one: Sample, other: Sample, data: st.DataObject) -> None:
    """Only the copy counts. At worst it has the beginning of one table and the end of another."""
    first, second = record_of(one), record_of(other)
    cut = data.draw(st.integers(8, min(len(first), len(second))))
    decoded_or_refused(first[:cut] + second[cut:], one.data_begin, one.byte_size)
