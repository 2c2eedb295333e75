"""Broken tables and results by the hundred thousand: each is refused by one class of error, in no time, or right.

``--tables`` says how many: the decoders get a hundred times as many as the server.
"""

from __future__ import annotations

import random
import struct
from typing import Final

import pytest

from shm_backend_utils.errors import PeerError, TableError
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.refusals import refusal
from shm_backend_utils.protocol.spans import MAX_TENSORS, Table
from tests.property.fuzz_tables import Outcome, Valid, fuzzed
from tests.property.random_tables import check_table, random_results, random_table, record_of, results_record

PER_SERVERS_TABLE: Final = 100
CORPUS: Final = 500
LARGE_ONES: Final = 5
MOST_CHECKED: Final = 50  # the check takes its time
LONGEST_S: Final = 0.001

FIELDS: Final = {
    *("length", "probe", "generation", "region_count", "frame_count", "frame_slot", "frame_stride"),
    *("input_count and output_count", "inputs or outputs", "outputs.NAME"),
    *("inputs[N]", "inputs[N].name", "inputs[N].datatype", "inputs[N].byte_size", "inputs[N].shape"),
    *("outputs[N]", "outputs[N].name"),
    *("regions[N]", "regions[N].kind", "regions[N].flags", "regions[N].name", "regions[N].name_length"),
    *("regions[N].byte_size", "regions[N].fence"),
}


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    tables: int = request.config.getoption("--tables")
    return PER_SERVERS_TABLE * tables


def check(found: tuple[int, Table], known: tuple[int, int]) -> None:
    if len(found[1].inputs) + len(found[1].outputs) <= MOST_CHECKED:
        check_table(found[1], *known)


@pytest.fixture(scope="module")
def of_tables(count: int) -> Outcome:
    """What came of tables of all sizes, up to the largest. Those that were accepted have been checked."""
    rng = random.Random(1)
    samples = [random_table(rng, MAX_TENSORS if index < LARGE_ONES else None) for index in range(CORPUS)]
    valid = []
    for sample in samples:
        record = record_of(sample)
        end = struct.unpack_from("<I", record, 8)[0]
        valid.append(Valid(record, 0, end, (sample.data_begin, sample.byte_size)))
    return fuzzed(count, rng, valid, lambda data, known: table.decode(data, *known), check)


@pytest.fixture(scope="module")
def of_results(count: int) -> Outcome:
    rng = random.Random(1)
    valid = []
    for found, byte_sizes in [random_results(rng) for _ in range(CORPUS)]:
        half = results_record(found)
        valid.append(Valid(half, 16, struct.unpack_from("<I", half, 16)[0], byte_sizes))
    return fuzzed(count, rng, valid, results.decode, lambda *_: None)


def test_a_broken_table_is_refused_by_one_class_of_error_or_it_is_right(of_tables: Outcome, count: int) -> None:
    assert of_tables.accepted + of_tables.reasons.total() == count
    for (_, kind), error in of_tables.errors.items():
        assert kind is TableError
        assert isinstance(error, TableError)
        assert refusal(error).startswith(f"shm:table: {error.field}: found ")


def test_every_field_of_a_table_is_among_those_that_were_refused(of_tables: Outcome, count: int) -> None:
    assert of_tables.reasons.keys() == FIELDS
    assert min(of_tables.accepted, of_tables.reasons.total()) > count / 10


def test_no_table_takes_a_decoder_longer_than_a_millisecond(of_tables: Outcome) -> None:
    """On a busy machine, which slows the largest valid table down as well, no longer than three of those."""
    assert of_tables.longest_s < max(LONGEST_S, 3 * of_tables.longest_of_valid_s)


def test_broken_results_are_refused_by_one_class_of_error_or_taken(of_results: Outcome, count: int) -> None:
    assert of_results.accepted + of_results.reasons.total() == count
    assert {kind for _, kind in of_results.errors} == {PeerError}


def test_no_results_take_a_decoder_longer_than_a_millisecond(of_results: Outcome) -> None:
    assert of_results.longest_s < max(LONGEST_S, 3 * of_results.longest_of_valid_s)
