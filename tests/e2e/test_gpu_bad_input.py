"""What is wrong with memory of GPUs is refused with one clear error, tells no secret, and harms no later call."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import InferenceError, Result, ShmClient
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.memory import CudaAccess, CudaAllocation
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH, CudaError, CudaRuntime
from shm_backend_utils.memory.locks import has_users
from shm_backend_utils.server import EmbeddedServer

from .fake_gpus import (
    HAND_MADE_SIZE,
    MODEL,
    Y_OFFSET,
    Gpu,
    HandMade,
    X,
    ask,
    claim_of,
    flavour_of,
    gpu_of,
    hand_made_for,
)

ON_THE_GPU = (X.shape, X.dtype, "cuda:0")


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    with hand_made_for(triton_server) as made:
        yield made


def refused(made: HandMade) -> tuple[str, str]:
    """Return the code and the message of a refusal, which tells no secret and leaves nothing behind."""
    known = [claim[name] for claim in made.regions for name in ("handle", "key", "token") if name in claim]
    with pytest.raises(InferenceServerException) as refusal:
        made.send()
    message = refusal.value.message()
    assert not [secret for secret in known if secret in message or _in_hexadecimal(secret) in message]
    assert not has_users(made.region.segment.fileno())
    return refusal.value.status(), message


def _in_hexadecimal(secret: str) -> str:
    try:
        return base64.b64decode(secret, validate=True).hex()
    except ValueError:
        return secret


def test_the_hand_made_descriptor_works_as_long_as_nothing_breaks_it(hand_made: HandMade) -> None:
    hand_made.send()
    assert hand_made.is_doubled


def _handle_of(length: int) -> Callable[[HandMade], None]:
    def change(made: HandMade) -> None:
        made.regions[1]["handle"] = base64.b64encode(made.allocation.handle[:length].ljust(length, b"\1")).decode()

    return change


def _claim(**fields: Any) -> Callable[[HandMade], None]:
    return lambda made: made.regions[1].update(fields)


def _memory_on_another_gpu(made: HandMade) -> None:
    made.regions[1]["device_uuid"] = made.cuda.device_uuid(1)


def _freed_memory(made: HandMade) -> None:
    freed = CudaAllocation(made.cuda, HAND_MADE_SIZE, 0)
    made.regions[1] = claim_of(freed)
    freed.free()


def _memory_of_the_model_itself(made: HandMade) -> None:
    handle = bytes(ask(MODEL, made.url, "export"))
    assert len(handle) == HANDLE_LENGTH
    made.regions[1]["handle"] = base64.b64encode(handle).decode()


def _host_memory(made: HandMade) -> None:
    name = made.region.segment.key.encode().ljust(HANDLE_LENGTH, b"\0")
    made.regions[1]["handle"] = base64.b64encode(name).decode()


def _slot_region_is_a_gpus(made: HandMade) -> None:
    made.regions.append({**claim_of(made.allocation, 1), "handle": base64.b64encode(bytes(64)).decode()})


def _slot_region_comes_later(made: HandMade) -> None:
    made.descriptor["regions"] = [claim_of(made.allocation, 1), made.regions[0]]
    made.descriptor["inputs"]["X"][0] = made.descriptor["outputs"]["Y"][0] = 0


def _named_twice(made: HandMade) -> None:
    made.regions.append(made.regions[1] | {"byte_size": Y_OFFSET})


NOT_A_SLOT_REGION = "the index of an earlier region of kind 'system' or 'lent', or null"
NOT_A_HANDLE = "regions[1].handle: found another string, expected 64 bytes, a CUDA IPC handle, in base64"
LIES = {
    "handle too short": (_handle_of(63), NOT_A_HANDLE),
    "handle too long": (_handle_of(65), NOT_A_HANDLE),
    "handle that is no base64": (_claim(handle="~" * 88), NOT_A_HANDLE),
    "GPU that the model does not see": (
        _claim(device_uuid="0" * 32),
        "regions[1] refused: it is on a GPU that this model does not see (it sees 2)",
    ),
    "GPU by its number": (_claim(device_uuid=0), "regions[1].device_uuid"),
    "handle of another GPU": (_memory_on_another_gpu, "is on a GPU that this process cannot reach"),
    "freed memory": (_freed_memory, "its owner has freed the memory"),
    "memory of the model itself": (_memory_of_the_model_itself, "the handle was exported by this very process"),
    "host memory": (_host_memory, "the handle is none of this machine's GPUs"),
    "size beyond the allocation": (
        _claim(byte_size=HAND_MADE_SIZE + 1),
        f"regions[1] refused: it claims {HAND_MADE_SIZE + 1} bytes of an allocation of {HAND_MADE_SIZE}",
    ),
    "span beyond the claim": (_claim(byte_size=Y_OFFSET), f"an end at byte {Y_OFFSET + X.nbytes}"),
    "slot region that there is not": (
        _claim(slot_region=7),
        f"regions[1].slot_region: found 7, expected {NOT_A_SLOT_REGION}",
    ),
    "slot region before the first": (_claim(slot_region=-1), "regions[1].slot_region: found -1"),
    "slot region that is itself": (_claim(slot_region=1), f"found 1, expected {NOT_A_SLOT_REGION}"),
    "slot region on a GPU": (_slot_region_is_a_gpus, f"regions[2].slot_region: found 1, expected {NOT_A_SLOT_REGION}"),
    "slot region that comes later": (
        _slot_region_comes_later,
        f"regions[0].slot_region: found 1, expected {NOT_A_SLOT_REGION}",
    ),
    "one allocation, two sizes": (_named_twice, "regions[2].handle: found a region that is named before"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_descriptor_is_refused_and_an_honest_one_served(hand_made: HandMade, lie: str) -> None:
    honest = json.dumps(hand_made.descriptor)
    change, complaint = LIES[lie]
    change(hand_made)
    before = hand_made.content().copy()
    code, message = refused(hand_made)
    assert code == "StatusCode.INVALID_ARGUMENT"
    assert complaint in message
    np.testing.assert_array_equal(hand_made.content(), before)
    hand_made.descriptor = json.loads(honest)
    hand_made.send()
    assert hand_made.is_doubled


def test_memory_whose_slot_region_was_removed_is_gone(hand_made: HandMade) -> None:
    hand_made.region.segment.unlink()
    code, message = refused(hand_made)
    assert code == "StatusCode.NOT_FOUND"
    assert "regions[0]" in message


@pytest.mark.parametrize(
    "sizes",
    [(HAND_MADE_SIZE, HAND_MADE_SIZE - 8), (HAND_MADE_SIZE - 8, HAND_MADE_SIZE)],
    ids=["smaller later", "larger later"],
)
def test_descriptors_may_claim_different_sizes_of_one_allocation(hand_made: HandMade, sizes: tuple[int, int]) -> None:
    for byte_size in sizes:
        hand_made.content()[Y_OFFSET // 4 :] = 0
        hand_made.regions[1]["byte_size"] = byte_size
        hand_made.send()
        assert hand_made.is_doubled


def test_no_claim_is_believed_because_a_smaller_one_was_true(hand_made: HandMade) -> None:
    hand_made.send()
    hand_made.regions[1]["byte_size"] = HAND_MADE_SIZE + 1
    with pytest.raises(
        InferenceServerException, match=f"claims {HAND_MADE_SIZE + 1} bytes of an allocation of {HAND_MADE_SIZE}"
    ):
        hand_made.send()


# What a client notices, or its model on its behalf


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


def content(array: Any) -> list[float]:
    values: list[float] = array.peek().tolist()
    return values


def doubles_on_the_gpu(gpu: Gpu) -> bool:
    with gpu.infer("double", gpu.array(X), ON_THE_GPU, path="direct") as result:
        return bool(content(result["Y"]) == (X * 2).tolist())


class HostArrayThatClaimsToBeOnAGpu:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": X.shape, "typestr": X.dtype.str, "data": (X.ctypes.data, False)}


def test_a_host_array_that_claims_to_be_on_a_gpu_is_refused(gpu: Gpu) -> None:
    with pytest.raises(MachineError, match="the handle is none of this machine's GPUs"):
        gpu.infer("double", HostArrayThatClaimsToBeOnAGpu())
    assert doubles_on_the_gpu(gpu)


def test_a_client_whose_memory_cannot_be_opened_once_takes_other_memory(gpu: Gpu) -> None:
    gpu.told("fail_next", method="open", name="cudaErrorInvalidResourceHandle", times=1)
    assert doubles_on_the_gpu(gpu)
    assert gpu.client.stats().retries == 1


def test_a_client_whose_memory_cannot_be_opened_at_all_takes_another_path(gpu: Gpu) -> None:
    gpu.told("fail_next", method="open", name="cudaErrorMapBufferObjectFailed", times=2)
    with gpu.infer("double_where_it_is_wanted", gpu.array(X), ON_THE_GPU) as result:
        assert (result.path, content(result["Y"])) == ("triton-shm", (X * 2).tolist())
    gpu.client.explain(MODEL)  # checks everything anew
    assert doubles_on_the_gpu(gpu)


# Where CUDA is missing


MISSING = {
    "CuPy": "GPU memory needs CuPy, which is not installed; install triton-shm-backend-utils[cuda]",
    "driver": "cudaErrorInsufficientDriver: the NVIDIA driver is missing, or older than CuPy's CUDA; update it",
}


@pytest.mark.parametrize("where", ["cuda:0", None])
@pytest.mark.parametrize("lacks", MISSING)
def test_a_model_that_can_use_no_gpu_says_why_and_serves_the_host(gpu: Gpu, lacks: str, where: str | None) -> None:
    def infer(x: Any, where: str | None) -> Result:
        return gpu.client.infer("fake_gpu_missing", {"X": x}, outputs={"Y": where}, parameters={"lacks": lacks})

    infer(X, None).release()
    refusal = refusal_of(lambda: infer(gpu.array(X), where))
    assert refusal.startswith("[StatusCode.UNAVAILABLE] ")
    assert MISSING[lacks] in refusal
    with infer(X, None) as result:
        assert (result.path, result["Y"].tolist()) == ("direct", (X * 2).tolist())


def refusal_of(call: Callable[[], object]) -> str:
    """Return what a model says against a call. Nothing is kept of the error, which has the call's arrays."""
    with pytest.raises(InferenceError) as refusal:
        call()
    return str(refusal.value)


def test_a_model_that_is_asked_for_nothing_on_a_gpu_loads_no_cuda(triton_server: EmbeddedServer) -> None:
    with ShmClient(triton_server.grpc_url) as client:

        def loads() -> int:
            with client.infer("fake_gpu_missing", {"X": X}, parameters={"tell_loads": True}) as told:
                return int(told["Y"][0])

        before = loads()
        client.infer("fake_gpu_missing", {"X": X}, outputs={"Y": X.nbytes}).release()
        client.infer("fake_gpu_missing", {"X": X}, path="inline").release()
        assert loads() == before


def _without_cupy() -> CudaAccess:
    return CudaAccess()


def _with_an_old_driver() -> CudaAccess:
    def load() -> CudaRuntime:
        raise CudaError("counting the GPUs", "cudaErrorInsufficientDriver")

    return CudaAccess(load)


@pytest.mark.parametrize(
    ("access", "complaint"),
    [(_without_cupy, MISSING["CuPy"]), (_with_an_old_driver, MISSING["driver"])],
    ids=["CuPy", "driver"],
)
def test_a_client_that_can_use_no_gpu_says_why_and_sends_from_the_host(
    triton_server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    access: Callable[[], CudaAccess],
    complaint: str,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with ShmClient(triton_server.grpc_url, cuda=access()) as client:
        with pytest.raises(MachineError, match=re.escape(complaint)):
            client.infer(MODEL, {"X": X}, outputs={"Y": "cuda:0"}, parameters={"deed": "double"})
        with pytest.raises(MachineError, match=re.escape(complaint)):
            client.prepare(MODEL, {"X": (X.shape, X.dtype, "cuda:0")})
        with client.infer(MODEL, {"X": X}, parameters={"deed": "double"}) as result:
            np.testing.assert_array_equal(result["Y"], X * 2)
