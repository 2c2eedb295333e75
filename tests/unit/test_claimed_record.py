"""A request's record as the model takes it in: with the lease, of memory that is still there, and copied once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import RegionRefusedError, StaleRequestError, TableError
from shm_backend_utils.memory.locks import is_slot_in_use
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model.mapping.mapped import MappedRegion, Slot
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.spans import Table
from tests.unit.table_client import Client
from tests.unit.watched import Watched

X = np.arange(4, dtype=np.float32)


def slot_of(client: Client) -> Slot:
    """Return the client's slot as a model has it mapped."""
    return Slot(MappedRegion(ManagedRegion.open(client.region.segment.key, client.region.header.token.hex(), "r")), 0)


def watch(slot: Slot, before_copy: Callable[[], object] = lambda: None) -> list[str]:
    """Have something done before a model reads a record of its client's; return what it reads, as it does."""
    reads: list[str] = []

    def copy() -> None:
        reads.append("record")
        before_copy()

    record: Any = slot.record
    record.request = Watched(record.request, before_read=copy)
    record.client_words = Watched(record.client_words, before_read=lambda: reads.append("generation"))
    return reads


# The lease


def is_leased(client: Client) -> bool:
    return is_slot_in_use(client.region.segment.fileno(), client.region.record_offset(0))


def test_the_lease_is_taken_before_the_record_is_copied(client: Client) -> None:
    slot = slot_of(client)
    said = client.laid_out({"X": X}, {"Y": 16})
    client.begin(said)
    leased: list[bool] = []
    watch(slot, lambda: leased.append(is_leased(client)))
    assert not is_leased(client)
    assert slot.claim(1) == said
    assert leased == [True]
    slot.lease.give_back()


@pytest.mark.parametrize("outcome", [None, TableError, StaleRequestError])
def test_the_record_is_copied_once_at_most_and_its_generation_is_not_read_after_that(
    client: Client, outcome: type[Exception] | None
) -> None:
    slot = slot_of(client)
    client.begin(client.laid_out({"X": X}, {"Y": 16}))
    reads = watch(slot)
    if outcome is TableError:
        client.region.record(0).table[:16] = bytes(16)
    if outcome is None:
        slot.claim(1)
        slot.lease.give_back()
    else:
        with pytest.raises(outcome):
            slot.claim(2 if outcome is StaleRequestError else 1)
    assert reads == (["generation"] if outcome is StaleRequestError else ["generation", "record"])


@pytest.mark.parametrize("is_next_one_valid", [True, False])
def test_a_client_that_writes_another_table_changes_all_or_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch, is_next_one_valid: bool
) -> None:
    slot = slot_of(client)
    said, other = client.laid_out({"X": X}, {"Y": 16}), client.laid_out({"X": X[:2], "Z": X}, {"Y": 64, "W": 32})
    encoded = table.encode(other) if is_next_one_valid else b"\xff" * len(table.encode(other))
    client.begin(said)
    decode = table.decode

    def decode_late(data: bytes, data_begin: int, byte_size: int) -> tuple[int, Table]:
        assert type(data) is bytes
        client.region.record(0).begin(2, encoded)
        return decode(data, data_begin, byte_size)

    with monkeypatch.context() as patch:
        patch.setattr(table, "decode", decode_late)
        assert slot.claim(1) == said, "it came after the copy"
    slot.lease.give_back()
    client.region.record(0).begin(3, table.encode(said))
    watch(slot, lambda: client.region.record(0).begin(4, encoded))
    with pytest.raises(StaleRequestError):
        slot.claim(3)
    if is_next_one_valid:
        assert slot.claim(4) == other
        slot.lease.give_back()


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, SystemExit])
def test_what_breaks_off_the_copy_is_told_as_it_is_and_leaves_nobody_with_the_lease(
    client: Client, kind: type[BaseException]
) -> None:
    """It says nothing of the request, which may be sent again: whoever hears that one is stale does not."""
    slot = slot_of(client)

    def break_off() -> None:
        raise kind

    client.begin(client.laid_out({"X": X}, {"Y": 16}))
    watch(slot, break_off)
    with pytest.raises(kind):
        slot.claim(1)
    assert client.is_free()


# The size


def truncate(client: Client, byte_size: int) -> None:
    with Path("/dev/shm", client.region.segment.key).open("r+b") as file:
        file.truncate(byte_size)


def test_the_size_is_looked_at_before_anything_is_touched(client: Client) -> None:
    slot = slot_of(client)
    client.begin(client.laid_out({"X": X}, {"Y": 16}))
    reads = watch(slot)
    truncate(client, client.region.header.byte_size - PAGE_SIZE)
    with pytest.raises(RegionRefusedError):
        slot.claim(1)
    assert reads == []
    assert client.is_free()
