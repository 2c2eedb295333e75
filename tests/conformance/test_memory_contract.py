"""What the model may rely on of every kind of mapped memory: a new kind joins by an adapter in ``KINDS``."""

from __future__ import annotations

import gc
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.errors import RegionGoneError, RegionRefusedError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion, RegionKind
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.memory.segment import MappedSegment, SystemSegment
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.memory import HostMemory, Pinning
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.claims import NamedRegionClaim, RegionClaim
from shm_backend_utils.tensors.view import BufferAttributes, MemoryType
from tests.unit.claims_of import Resolved, claim_of_allocation, resolved, slot_of
from tests.unit.gpu.fakes import CLIENT, DRIVER, MODEL, array_on, content, left_of, wait_until
from tests.unit.sessions import say_registered

FIELD: Final = "regions[1]"
SIZE: Final = 8192
BLOCK: Final = 2 * 2**20
"""What an allocation on a GPU has."""
DEVICE: Final = 1
INT32: Final = BY_NAME["INT32"]
PLACE: Final = 1024
"""Where in the data tests look."""


class Kind(ABC):
    """Memory of a client, and how a model's descriptor names it. Everything else is the same for all."""

    memory_type = MemoryType.CPU
    pins = False

    own: ManagedRegion | None = None
    """The region of the request's slot, if it has one."""
    handle: bytes | None = None
    """What a model is told to find it by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = DRIVER.runtime(MODEL)
        """The model's."""

    @abstractmethod
    def claim(self, more: int = 0) -> RegionClaim | None:
        """Name the memory; with a size that is larger by so many bytes than the truth. None if it is the slot's own."""

    @abstractmethod
    def data(self) -> npt.NDArray[np.uint8]:
        """Return the data as its owner has it, ``SIZE`` bytes."""

    @abstractmethod
    def mapping_count(self) -> int:
        """Return how often the model has it mapped."""

    @abstractmethod
    def go(self) -> None:
        """Let the owner give it up, as far as it may already. Twice is fine."""


def mappings_beside(segment: MappedSegment) -> int:
    """Return how often this process has an object mapped, beside what its owner has."""
    return Path("/proc/self/maps").read_text().count(f" {segment.identity[1]} ") - (not segment.is_closed)


class Managed(Kind):
    """POSIX shared memory with our header, named by its key."""

    kind = RegionKind.SYSTEM

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.own = self._region = ManagedRegion.create(SIZE, kind=self.kind)

    def claim(self, more: int = 0) -> RegionClaim | None:
        return None

    def data(self) -> npt.NDArray[np.uint8]:
        return self._region.data()

    def mapping_count(self) -> int:
        return mappings_beside(self._region.segment)

    def go(self) -> None:
        self._region.segment.unlink()
        self._region.close()


class Sealed(Managed):
    """A sealed memfd with our header, which the model fetches."""

    kind = RegionKind.SEALED


class Pinned(Managed):
    """The same, where the model pins what it maps."""

    memory_type = MemoryType.CPU_PINNED
    pins = True


class Foreign(Kind):
    """POSIX shared memory without a header, named as it is registered at the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self._registration = Registration(f"foreign-{os.getpid()}-{secrets.token_hex(8)}", 100, SIZE)
        self._segment = SystemSegment.create(self._registration.key, 100 + SIZE)
        self._more = 0
        say_registered(monkeypatch, self._registrations)

    def claim(self, more: int = 0) -> RegionClaim:
        self._more = more
        return NamedRegionClaim("mine")

    def data(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._segment.buffer(), np.uint8)[100:]

    def mapping_count(self) -> int:
        return mappings_beside(self._segment)

    def go(self) -> None:
        self._segment.unlink()
        self._segment.close()

    def _registrations(self) -> dict[str, Registration]:
        key, offset, byte_size = self._registration.key, self._registration.offset, self._registration.byte_size
        return {"mine": Registration(key, offset, byte_size + self._more)}


class Cuda(Kind):
    """Memory of a GPU, named by its handle, and fenced by the slot of a managed region."""

    memory_type = MemoryType.GPU

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.own = self._fence = ManagedRegion.create(1)
        self._client = DRIVER.runtime(CLIENT)
        self._allocation = CudaAllocation(self._client, BLOCK, DEVICE)
        self.handle = self._allocation.handle

    def claim(self, more: int = 0) -> RegionClaim:
        return claim_of_allocation(self._allocation, byte_size=BLOCK + more)

    def data(self) -> npt.NDArray[np.uint8]:
        return DRIVER.memory(self._allocation.address, (BLOCK,), np.uint8)

    def mapping_count(self) -> int:
        return left_of(MODEL).opened

    def go(self) -> None:
        self._fence.segment.unlink()
        if not self._fence.segment.is_closed and not has_users(self._fence.segment.fileno()):
            self._fence.close()
            self._allocation.free()
            collect(self._client)


KINDS: Final[dict[str, type[Kind]]] = {
    "managed": Managed,
    "sealed": Sealed,
    "pinned": Pinned,
    "foreign": Foreign,
    "cuda": Cuda,
}


def on_host(array: Any) -> npt.NDArray[Any]:
    """Return an array, or the fake GPU's memory under it."""
    return content(array) if isinstance(array, DeviceArray) else array


def collect(cuda: CudaRuntime) -> None:
    """Unmap and unpin what nobody refers to any more."""
    wait_until(lambda: not cuda.retired.collect())


def mappings_of(kind: Kind) -> int:
    """Return how often the memory is mapped, when what is due was unmapped."""
    collect(kind.cuda)
    return kind.mapping_count()


class Model:
    """Resolves what names memory of one kind, as a request would have it done."""

    def __init__(self, kind: Kind) -> None:
        access = CudaAccess(lambda: kind.cuda)
        self.warnings: list[str] = []
        pinning = Pinning(access, self.warnings.append) if kind.pins else None
        self.resolver = Resolver(Config(), access, pinning)
        self.registry = self.resolver.registry
        self._kind = kind

    def map(self, more: int = 0) -> Resolved:
        kind = self._kind
        own = None if kind.own is None else slot_of(self.resolver, kind.own)
        claim = kind.claim(more)
        if claim is not None:
            return resolved(self.resolver, claim, own)
        assert own is not None
        managed = own.region.managed
        assert managed is not None
        whole = own.region.memory
        assert isinstance(whole, HostMemory)
        byte_size = managed.header.byte_size + more
        return Resolved(own.region, HostMemory(whole.array, whole.memory_type, 0, byte_size, managed.data_offset))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    before = left_of(MODEL), left_of(CLIENT)
    kind = KINDS[request.param](monkeypatch)
    yield kind
    gc.collect()  # what only waits for the collector is no leak
    collect(kind.cuda)
    kind.go()
    assert (left_of(MODEL), left_of(CLIENT)) == before


@pytest.fixture
def model(kind: Kind) -> Iterator[Model]:
    model = Model(kind)
    yield model
    model.resolver.close()
    assert model.warnings == []


def numbers(found: Resolved, *, writable: bool = True) -> Any:
    """Return a view of six numbers at ``PLACE`` in the data."""
    view = found.memory.view("X", found.memory.data_begin + PLACE, 24, INT32, (2, 3), writable=writable)
    assert view is not None
    return view


def test_both_sides_see_what_the_other_writes_to_a_views_own_bytes(kind: Kind, model: Model) -> None:
    kind.data()[:] = 1
    array = on_host(numbers(model.map()).array)
    array[:] = 0
    assert np.flatnonzero(kind.data() == 0).tolist() == list(range(PLACE, PLACE + 24))
    place = kind.data()[PLACE : PLACE + 24].view(np.int32)
    place[:] = range(6)
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    array[1, 2] = 77
    assert place.tolist() == [0, 1, 2, 3, 4, 77]


def test_attributes_agree_with_the_memory(kind: Kind, model: Model) -> None:
    device = DEVICE if kind.memory_type is MemoryType.GPU else 0
    view = numbers(model.map())
    assert view.attributes == BufferAttributes(kind.memory_type, device, view.array.nbytes, kind.handle)


def test_memory_knows_its_own_arrays_by_their_place(kind: Kind, model: Model) -> None:
    memory = model.map().mapped.memory
    assert memory.offset_of(memory.part(500, 100).bytes()) == 500
    assert memory.part(100, 800).offset_of(memory.part(500, 100).bytes()) == 400
    assert memory.offset_of(memory.part(100, 800).part(50, 10).bytes()) == 150
    if memory.device is None:
        assert memory.offset_of(memory.bytes()[::2]) is None
    other = np.zeros(4, np.uint8) if memory.device is not None else array_on(kind.cuda, [1, 2], DEVICE)
    assert memory.offset_of(other) is None
    assert memory.part(0, 10).follows(memory.part(10, 10))
    assert not memory.follows(HostMemory(np.empty(10, np.uint8)))
    assert not HostMemory(np.empty(10, np.uint8)).follows(memory)


def test_memory_is_mapped_once_however_often_it_is_named(kind: Kind, model: Model) -> None:
    assert mappings_of(kind) == 0
    found = [model.map().mapped for _ in range(3)]
    assert found[0] is found[1] is found[2]
    assert mappings_of(kind) == 1
    assert model.registry.mapped()[0] >= SIZE


def test_memory_is_unmapped_when_its_last_use_ends(kind: Kind, model: Model) -> None:
    uses, counts = [model.map(), model.map()], []
    model.registry.free_all_names()
    while uses:
        counts.append(mappings_of(kind))
        uses.pop()
    assert (counts, mappings_of(kind)) == ([1, 1], 0)


def test_arrays_outlive_the_region_and_their_owner(kind: Kind, model: Model) -> None:
    array = numbers(model.map()).array
    model.registry.free_all_names()
    on_host(array)[:] = 7
    assert kind.data()[PLACE : PLACE + 24].view(np.int32).tolist() == [7] * 6
    assert mappings_of(kind) == 1
    kind.go()
    model.registry.drop_abandoned()
    assert on_host(array).sum() == 42
    del array
    gc.collect()
    assert mappings_of(kind) == 0
    model.resolver.close()
    model.resolver.close()


@pytest.mark.parametrize("kind", ["foreign", "cuda"], indirect=True)  # a slot's address claims no size
def test_more_than_there_is_is_refused_before_anything_is_viewed(kind: Kind, model: Model) -> None:
    for more in (1, 4096, 2**62):
        with pytest.raises(RegionRefusedError) as refusal:
            model.map(more)
        assert refusal.value.field in (FIELD, "shm_io.regions[0]")
        del refusal
        gc.collect()
        model.registry.free_all_names()
        assert mappings_of(kind) == 0


def test_a_view_of_more_bytes_than_its_span_is_not_made(model: Model) -> None:
    memory = model.map().memory
    for shape in ((7,), (2**40, 2**40), (2, 3, 2)):
        assert memory.view("X", memory.data_begin, 24, INT32, shape, writable=True) is None


def test_memory_whose_owner_has_gone_is_refused_although_it_is_mapped_and_unmapped(kind: Kind, model: Model) -> None:
    use = model.map()
    kind.go()
    with pytest.raises((RegionGoneError, RegionRefusedError)):
        model.map()
    del use
    model.registry.drop_abandoned()
    assert mappings_of(kind) == 0
    assert model.registry.names == {}
    with pytest.raises((RegionGoneError, RegionRefusedError)):
        model.map()
