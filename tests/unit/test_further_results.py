"""Outputs that a model has left in a further region of the client's own, on the host."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.paths.direct import result_of
from shm_backend_utils.client.paths.further import HostMemory
from shm_backend_utils.client.result import Result
from shm_backend_utils.dtypes import BY_NAME, BYTES
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.need import Need
from shm_backend_utils.memory.pool.options import PoolOptions
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE
from shm_backend_utils.protocol.results import OutputPlace

FP32 = BY_NAME["FP32"]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(PoolOptions(max_bytes=2**20))
    yield pool
    pool.close()


@pytest.fixture
def own() -> npt.NDArray[np.uint8]:
    """The region of the request's slot."""
    return np.full(PAGE_SIZE, 0xFF, np.uint8)


@pytest.fixture
def further(pool: SlotPool) -> Iterator[HostMemory]:
    further = HostMemory(*pool.redeem(pool.request(Need(PAGE_SIZE, 1, PAGE_SIZE), "a test")))
    yield further
    further.memory = further.memory[:0].copy()


def read(own: npt.NDArray[np.uint8], further: HostMemory, *places: OutputPlace) -> Result:
    return result_of(places, own, [further], lambda: None)


def test_an_output_is_a_view_of_the_further_region(own: npt.NDArray[np.uint8], further: HostMemory) -> None:
    offset = further.region.data_offset
    array = read(own, further, OutputPlace("Y", FP32, (2, 3), 1, offset, 24, False))["Y"]
    array[...] = np.arange(6).reshape(2, 3)
    assert further.memory[offset : offset + 24].view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_strings_are_read_there_too(own: npt.NDArray[np.uint8], further: HostMemory) -> None:
    encoded = struct.pack("<I1sI3s", 1, b"a", 3, b"\0b\xff")
    offset = further.region.data_offset
    further.memory[offset : offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
    array = read(own, further, OutputPlace("S", BYTES, (2,), 1, offset, len(encoded), False))["S"]
    assert array.tolist() == [b"a", b"\0b\xff"]


def test_an_array_keeps_both_regions_until_it_is_gone(pool: SlotPool, own: npt.NDArray[np.uint8]) -> None:
    further = HostMemory(*pool.redeem(pool.request(Need(PAGE_SIZE, 1, PAGE_SIZE), "a test")))
    kept: list[weakref.ref[Any]] = [weakref.ref(further.memory), weakref.ref(owner := own.view())]
    array = read(owner, further, OutputPlace("Y", FP32, (1,), 1, PAGE_SIZE, 4, False))["Y"]
    part = array.reshape(1, 1)
    del further, owner, array
    gc.collect()
    assert [each() is None for each in kept] == [False, False]
    assert pool.status.held == 1
    del part
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert pool.status.held == 0


def test_an_output_that_ends_behind_the_region_is_the_peers_fault(
    own: npt.NDArray[np.uint8], further: HostMemory
) -> None:
    with pytest.raises(PeerError, match="break the protocol"):
        read(own, further, OutputPlace("Y", FP32, (1,), 1, further.memory.nbytes, 4, False))


def test_a_table_names_it_by_its_secret(further: HostMemory) -> None:
    claim, region = further.claim, further.region
    assert (claim.key, claim.byte_size, claim.token, claim.slot) == (region.key, region.byte_size, region.token, 0)
