"""Clients' device memory in the model's process: registered by hand, claimed by a descriptor, or refused."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shm_backend_utils.errors import CallerError, MachineError, RegionGoneError, RegionRefusedError, ShmError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.model import RegionStatus, SharedMemoryManager
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping.mapped import MappedRegion
from shm_backend_utils.model.mapping.resolver import Resolver
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import Table
from shm_backend_utils.tensors.attributes import BufferAttributes, MemoryType
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, LiveCounts
from tests.unit.claims_of import Resolved, claim_of_allocation, resolved, slot_of
from tests.unit.fake_gpu import SIZE, objects_of, runtime_that_gives_all_back

DEVICE = 1
FIELD = "regions[1]"
NOTHING = LiveCounts()


@pytest.fixture
def client() -> Iterator[FakeCuda]:
    """The CUDA of the process whose memory it is."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
    assert objects_of(os.getpid()) == []


@pytest.fixture
def cuda(client: FakeCuda) -> Iterator[FakeCuda]:
    """The CUDA of the model's process."""
    with runtime_that_gives_all_back() as cuda:
        yield cuda
        assert cuda.current_device() == 0


@pytest.fixture
def allocation(client: FakeCuda) -> Iterator[CudaAllocation]:
    allocation = CudaAllocation(client, SIZE, DEVICE)
    yield allocation
    allocation.free()


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    """The region whose slot fences the device memory, as the client has it."""
    region = ManagedRegion.create(100)
    yield region
    region.segment.unlink()
    region.close()


@pytest.fixture
def manager(cuda: FakeCuda, region: ManagedRegion) -> Iterator[SharedMemoryManager]:
    manager = SharedMemoryManager(cuda=CudaAccess(lambda: cuda))
    yield manager
    manager.unregister_all()


def register(
    manager: SharedMemoryManager, allocation: CudaAllocation, name: str = "mine", byte_size: int = SIZE
) -> MappedRegion:
    manager.register_cuda_shared_memory(name, allocation.handle, byte_size, DEVICE)
    found = manager.find(name)
    assert found is not None
    return found[0]


class Model:
    """Resolves requests that name a slot of a managed region, and then device memory."""

    def __init__(
        self, cuda: Callable[[], FakeCuda], region: ManagedRegion, limit: int | None = None, **config: Any
    ) -> None:
        self.resolver = Resolver(Config(max_mapped_bytes=limit, **config), CudaAccess(cuda))
        self.manager = self.resolver.registry
        self._region = region

    def resolve(self, claim: CudaRegionClaim) -> Resolved:
        return resolved(self.resolver, claim, slot_of(self.resolver, self._region))


@pytest.fixture
def model(cuda: FakeCuda, region: ManagedRegion) -> Iterator[Model]:
    model = Model(lambda: cuda, region)
    yield model
    model.resolver.close()


def times(cuda: FakeCuda, operation: str) -> int:
    return sum(name == operation for name, _ in cuda.log)


# Registered by hand


def test_registered_memory_is_the_clients(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    memory = manager.get_memory_info("mine", 100, 10).memory
    memory.peek()[:] = 42
    here = allocation.array_at(0, memory.dtype, (SIZE,), SIZE)
    assert here is not None
    assert here.get()[99:111].tolist() == [here.get()[99], *[42] * 10, here.get()[110]]
    assert here.get()[99] != 42 != here.get()[110]


def test_a_part_of_registered_memory_has_its_attributes(
    manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    register(manager, allocation)
    attributes = manager.get_memory_info("mine", 100, 10).attributes
    assert attributes == BufferAttributes(MemoryType.GPU, DEVICE, 10, allocation.handle)


def test_the_status_tells_no_handle(manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    assert manager.status() == [RegionStatus("mine", "", 0, SIZE)]


@pytest.mark.parametrize(("offset", "byte_size"), [(0, SIZE + 1), (SIZE, 1), (-1, 1), (1, 2**63 - 1)])
def test_a_part_that_is_not_in_the_memory_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, offset: int, byte_size: int
) -> None:
    register(manager, allocation)
    with pytest.raises(CallerError, match=f"of region 'mine' were asked for; expected 0 to {SIZE}"):
        manager.get_memory_info("mine", offset, byte_size)


def test_only_as_much_as_was_registered_can_be_reached(
    manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    register(manager, allocation, byte_size=SIZE - 1)
    with pytest.raises(CallerError, match=f"expected 0 to {SIZE - 1}"):
        manager.get_memory_info("mine", 0, SIZE)


def test_two_names_of_one_allocation_share_one_mapping(
    cuda: FakeCuda, manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    assert register(manager, allocation, "first") is register(manager, allocation, "second")
    assert (times(cuda, "open"), manager.mapped_bytes) == (1, SIZE)
    manager.unregister("first")
    assert cuda.live.opened == 1
    manager.unregister("second")
    assert cuda.live == NOTHING


def test_a_name_is_given_once_whatever_the_kind(
    manager: SharedMemoryManager, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    manager.register_system_shared_memory("mine", region.segment.key, 0, 100)
    with pytest.raises(CallerError, match="region 'mine' is registered already; unregister it first"):
        register(manager, allocation)


def test_memory_in_use_is_unmapped_when_its_use_ends(
    cuda: FakeCuda, manager: SharedMemoryManager, allocation: CudaAllocation
) -> None:
    use = register(manager, allocation)
    manager.unregister("mine")
    assert cuda.live.opened == 1
    del use
    assert cuda.live == NOTHING


def test_arrays_outlive_their_name(cuda: FakeCuda, manager: SharedMemoryManager, allocation: CudaAllocation) -> None:
    register(manager, allocation)
    memory = manager.get_memory_info("mine", 0, SIZE).memory
    manager.unregister_all()
    memory.peek()[:] = 42
    assert cuda.live.opened == 1
    del memory
    assert cuda.live == NOTHING


def test_unused_memory_makes_room(client: FakeCuda, cuda: FakeCuda, allocation: CudaAllocation) -> None:
    other = CudaAllocation(client, SIZE, DEVICE)
    manager = SharedMemoryManager(max_mapped_bytes=SIZE, cuda=CudaAccess(lambda: cuda))
    register(manager, allocation, "old")
    register(manager, other, "new")
    assert [status.name for status in manager.status()] == ["new"]
    assert cuda.live.opened == 1
    manager.unregister_all()


# Claimed by a descriptor


def test_claimed_memory_is_the_clients(model: Model, allocation: CudaAllocation) -> None:
    found = model.resolve(claim_of_allocation(allocation))
    assert (found.memory.begin, found.memory.byte_size) == (0, SIZE)
    assert found.memory.attributes() == BufferAttributes(MemoryType.GPU, DEVICE, SIZE, allocation.handle)


def test_claimed_memory_is_mapped_once_however_often_it_is_claimed(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    regions = {model.resolve(claim_of_allocation(allocation)).mapped for _ in range(3)}
    assert (len(regions), times(cuda, "open")) == (1, 1)


def test_the_gpu_is_found_by_its_uuid_whatever_its_number(
    client: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    cuda = FakeCuda(uuids=[client.device_uuid(1), client.device_uuid(0)])
    model = Model(lambda: cuda, region)
    assert model.resolve(claim_of_allocation(allocation)).memory.attributes().memory_type_id == 0
    model.resolver.close()


@pytest.mark.parametrize(("first", "second"), [(SIZE, 100), (100, SIZE)])
def test_another_descriptor_may_claim_more_or_less_of_the_same_memory(
    model: Model, allocation: CudaAllocation, first: int, second: int
) -> None:
    for byte_size in (first, second):
        assert model.resolve(claim_of_allocation(allocation, byte_size=byte_size)).memory.byte_size == byte_size


def test_the_client_sees_that_its_memory_is_mapped(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    assert has_users(region.segment.fileno())
    model.manager.unregister_all()
    assert not has_users(region.segment.fileno())


def test_the_client_sees_its_memory_mapped_as_long_as_an_array_lives(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    array: Any = model.resolve(claim_of_allocation(allocation)).memory.bytes()
    model.manager.unregister_all()
    assert has_users(region.segment.fileno())
    del array
    assert not has_users(region.segment.fileno())


def test_memory_is_unmapped_when_the_region_of_its_slot_was_removed(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    model.manager.drop_abandoned()
    assert cuda.live.opened == 1
    region.segment.unlink()
    model.manager.drop_abandoned()
    assert cuda.live == NOTHING
    assert model.manager.status() == []


def test_memory_of_which_the_client_has_let_go_in_the_meantime_is_not_mapped(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    own = slot_of(model.resolver, region)
    region.segment.unlink()
    with pytest.raises(RegionGoneError, match=r"^regions\[1\] was removed by its owner"):
        resolved(model.resolver, claim_of_allocation(allocation), own)
    assert cuda.live == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_no_slot_fences_is_unmapped_when_nobody_uses_it(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    claim = claim_of_allocation(allocation, fence=None)
    in_use = model.resolver.open_further(Table({}, {}, (claim,)), None)
    model.resolver.sweep()
    assert cuda.live.opened == 1
    in_use.release()
    assert cuda.live.opened == 1  # it serves the next request, if that comes soon
    del in_use
    model.resolver.sweep()
    assert cuda.live == NOTHING


def test_memory_that_a_slot_fences_stays_mapped_for_the_next_request(
    cuda: FakeCuda, model: Model, allocation: CudaAllocation
) -> None:
    model.resolve(claim_of_allocation(allocation))
    model.resolver.sweep()
    assert cuda.live.opened == 1


# Refused


def refusal(work: Callable[[], object], *secrets: bytes) -> ShmError:
    """Return the error of a memory that cannot be had: of the caller or of the machine, and without any secret."""
    with pytest.raises((RegionRefusedError, MachineError)) as caught:
        work()
    error = caught.value
    for secret in secrets:
        for text in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
            assert text not in str(error)
    del caught  # it has the frames, and what they hold
    return error.with_traceback(None)


TOO_SHORT, TOO_LONG = b"\1" * (HANDLE_LENGTH - 1), b"\1" * (HANDLE_LENGTH + 1)


@pytest.mark.parametrize("handle", [b"", TOO_SHORT, TOO_LONG], ids=len)
def test_a_handle_of_another_length_is_refused(cuda: FakeCuda, manager: SharedMemoryManager, handle: bytes) -> None:
    error = refusal(lambda: manager.register_cuda_shared_memory("mine", handle, SIZE, DEVICE))
    assert str(error) == f"region 'mine' refused: its handle has {len(handle)} bytes; expected {HANDLE_LENGTH}"
    assert (cuda.log, manager.status()) == ([], [])


@pytest.mark.parametrize("byte_size", [-1, 2**63])
def test_a_size_that_no_memory_has_is_refused(
    manager: SharedMemoryManager, allocation: CudaAllocation, byte_size: int
) -> None:
    with pytest.raises(CallerError, match="of region 'mine' were asked for; expected 0 to"):
        manager.register_cuda_shared_memory("mine", allocation.handle, byte_size, DEVICE)


def handle_of(allocation: CudaAllocation) -> bytes:
    return allocation.handle


def handle_of_freed(allocation: CudaAllocation) -> bytes:
    allocation.free()
    return allocation.handle


def no_handle_of_cuda(allocation: CudaAllocation) -> bytes:
    return bytes(HANDLE_LENGTH)


@pytest.mark.parametrize(
    ("offer", "byte_size", "device", "words"),
    [
        (handle_of, SIZE + 1, DEVICE, [f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"]),
        (handle_of, SIZE, 0, ["cudaErrorMapBufferObjectFailed", "this process cannot reach", "use the same instance"]),
        (handle_of, SIZE, 2, ["cudaErrorInvalidDevice", "there is no such device here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of, SIZE, -1, ["cudaErrorInvalidDevice", "there is no such device here", "see CUDA_VISIBLE_DEVICES"]),
        (handle_of_freed, SIZE, DEVICE, ["cudaErrorInvalidResourceHandle", "its owner has freed the memory", "--ipc"]),
        (no_handle_of_cuda, SIZE, DEVICE, ["cudaErrorInvalidValue", "the handle is none of this machine's GPUs"]),
    ],
    ids=["more than was allocated", "another GPU", "no such GPU", "a GPU below zero", "freed", "no handle"],
)
def test_memory_that_cannot_be_registered_is_refused_with_what_is_the_matter(
    cuda: FakeCuda,
    manager: SharedMemoryManager,
    allocation: CudaAllocation,
    offer: Callable[[CudaAllocation], bytes],
    byte_size: int,
    device: int,
    words: list[str],
) -> None:
    handle = offer(allocation)
    error = refusal(lambda: manager.register_cuda_shared_memory("mine", handle, byte_size, device), handle)
    assert isinstance(error, RegionRefusedError)
    assert error.field == "region 'mine'"
    assert [word for word in words if word not in error.reason] == []
    assert (cuda.live, manager.status(), manager.mapped_bytes) == (NOTHING, [], 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": TOO_SHORT}, [f"its handle has {len(TOO_SHORT)} bytes; expected {HANDLE_LENGTH}"]),
        ({"handle": bytes(HANDLE_LENGTH)}, ["cudaErrorInvalidValue", "the handle is none of this machine's GPUs"]),
        ({"byte_size": SIZE + 1}, [f"it claims {SIZE + 1} bytes of an allocation of {SIZE}"]),
        ({"device_uuid": "0" * 32}, ["that this model does not see (it sees 2)", "--gpus", "instance_group"]),
    ],
    ids=["a handle of another length", "no handle", "more than was allocated", "a GPU not seen"],
)
@pytest.mark.parametrize("fence", [0, None], ids=["fenced", "unfenced"])
def test_memory_that_cannot_be_claimed_is_refused_and_the_client_may_free_it(
    cuda: FakeCuda,
    model: Model,
    region: ManagedRegion,
    allocation: CudaAllocation,
    changes: dict[str, Any],
    words: list[str],
    fence: int | None,
) -> None:
    claim = claim_of_allocation(allocation, fence=fence, **changes)
    error = refusal(lambda: model.resolve(claim), claim.handle, allocation.handle, region.header.token)
    assert isinstance(error, RegionRefusedError)
    assert error.field == FIELD
    assert region.segment.key not in str(error)
    assert [word for word in words if word not in error.reason] == []
    assert cuda.live == NOTHING
    assert not has_users(region.segment.fileno())


def test_memory_that_is_on_another_gpu_than_is_claimed_is_refused(
    client: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    claim = claim_of_allocation(allocation, device_uuid=client.device_uuid(1 - DEVICE))
    error = refusal(lambda: model.resolve(claim), allocation.handle)
    assert "cudaErrorMapBufferObjectFailed" in str(error)
    assert not has_users(region.segment.fileno())


def test_claimed_memory_that_was_freed_is_refused(
    model: Model, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    allocation.free()
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation)), allocation.handle)
    assert "its owner has freed the memory" in str(error)
    assert not has_users(region.segment.fileno())


def test_memory_of_this_very_process_is_refused(
    client: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(lambda: client, region)
    for work in (lambda: register(model.manager, allocation), lambda: model.resolve(claim_of_allocation(allocation))):
        error = refusal(work, allocation.handle)
        assert isinstance(error, RegionRefusedError)
        assert "cudaErrorDeviceUninitialized" in error.reason
        assert "exported by this very process, which has the memory already" in error.reason
    model.resolver.close()


def test_memory_that_no_slot_fences_is_refused_where_the_model_takes_none(
    cuda: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(lambda: cuda, region, foreign_regions=False)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation, fence=None)), allocation.handle)
    assert str(error) == f"{FIELD} refused: this model takes no memory without a slot (its SHM_FOREIGN_REGIONS is off)"
    assert cuda.log == []
    assert model.resolve(claim_of_allocation(allocation)).memory.byte_size == SIZE
    model.resolver.close()


def test_too_much_memory_is_the_machines_fault(
    cuda: FakeCuda, region: ManagedRegion, allocation: CudaAllocation
) -> None:
    manager = SharedMemoryManager(max_mapped_bytes=SIZE - 1, cuda=CudaAccess(lambda: cuda))
    error = refusal(lambda: register(manager, allocation), allocation.handle)
    assert "SHM_MAX_MAPPED_BYTES" in str(error)
    assert (cuda.live, manager.status()) == (NOTHING, [])


# A machine that cannot


WITHOUT_CUPY = "GPU memory needs CuPy, which is not installed; install triton-shm-backend-utils[cuda]"


def no_cupy() -> FakeCuda:
    raise MachineError(WITHOUT_CUPY)


def test_without_cupy_the_machine_is_at_fault_and_the_error_says_what_to_install(
    region: ManagedRegion, allocation: CudaAllocation
) -> None:
    model = Model(no_cupy, region)
    for work in (
        lambda: register(model.manager, allocation),
        lambda: model.resolve(claim_of_allocation(allocation)),
        lambda: model.resolve(claim_of_allocation(allocation, fence=None)),
    ):
        error = refusal(work, allocation.handle, region.header.token)
        assert (type(error), str(error)) == (MachineError, WITHOUT_CUPY)
        assert not has_users(region.segment.fileno())
    model.resolver.close()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("cudaErrorInsufficientDriver", "the NVIDIA driver is missing, or older than CuPy's CUDA; update it"),
        ("cudaErrorNoDevice", "no GPU is visible here; see nvidia-smi"),
        ("cudaErrorNotSupported", "this platform has no CUDA IPC"),
    ],
)
def test_a_machine_whose_cuda_does_not_work_says_so_and_may_be_tried_again(
    cuda: FakeCuda, model: Model, region: ManagedRegion, allocation: CudaAllocation, name: str, remedy: str
) -> None:
    claim = claim_of_allocation(allocation)
    for method in ("device_count", "current_device"):
        cuda.fail_next(method, name)
        error = refusal(lambda: model.resolve(claim), allocation.handle, region.header.token)
        assert name in str(error)
        assert remedy in str(error)
        assert not has_users(region.segment.fileno())
    assert model.resolve(claim).memory.byte_size == SIZE


def test_a_machine_without_gpus_refuses_every_claim(region: ManagedRegion, allocation: CudaAllocation) -> None:
    cuda = FakeCuda(devices=0)
    model = Model(lambda: cuda, region)
    error = refusal(lambda: model.resolve(claim_of_allocation(allocation)))
    assert "it sees 0" in str(error)
    model.resolver.close()
