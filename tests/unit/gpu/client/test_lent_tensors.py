"""Tensors on GPUs that a model uses where the user has them, and how long they are kept."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CopyWarning, DeadlineExceededError, InferenceError, PoolOptions, ShmClient
from shm_backend_utils.errors import TensorError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.testing.fake_cuda.driver import Tensor
from tests.unit.gpu.client.conftest import ON_GPU, ON_HOST, X, doubled, gpu_client, on_host, tensor_of, wait_until
from tests.unit.gpu.client.gpu_server import GpuServer
from tests.unit.gpu.fakes import DRIVER


def loans(server: GpuServer) -> list[Any]:
    return [claim for claim in server.claims if isinstance(claim, CudaRegionClaim) and claim.is_for_one_request]


def test_beside_results_that_are_kept_the_other_input_lies_where_it_should(client: ShmClient) -> None:
    kept = [client.infer("m", {"IN0": np.full(16_384, n, np.float32)}, outputs={"OUT0": 65_536}) for n in range(12)]
    kept.pop()
    inputs = {"IN0": tensor_of(X), "IN1": np.full(28_672, -1, np.float32)}
    result = client.infer("two", inputs, outputs={**ON_HOST, "OUT1": 114_688}, path="direct")
    np.testing.assert_array_equal(result["OUT0"], 2 * X)
    assert [np.unique(each["OUT0"]).tolist() for each in kept] == [[2 * n] for n in range(11)]


def test_tensors_of_one_allocation_are_one_region(server: GpuServer, client: ShmClient) -> None:
    pool = tensor_of(np.arange(4000, dtype=np.float32))
    result = client.infer("two", {"IN0": pool[:600], "IN1": pool[64:664]}, outputs={**ON_HOST, "OUT1": X.nbytes})
    np.testing.assert_array_equal(result["OUT0"], 2 * X)
    np.testing.assert_array_equal(result["OUT1"], 2 * (X + 64))
    (claim,) = loans(server)
    assert (claim.fence, claim.waits) == (0, False)


def test_small_tensors_are_copied_and_nothing_is_told(server: GpuServer, cuda: CudaAccess) -> None:
    assert PoolOptions().lend_bytes == 256 * 2**20
    large = np.ones(2**20 // 4, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lend_bytes, is_lent in ((large.nbytes + 1, False), (large.nbytes, True)):
            with gpu_client(server, cuda, lend_bytes=lend_bytes) as client:
                client.infer("m", {"IN0": tensor_of(large)}, outputs={"OUT0": large.nbytes}).release()
                assert len(loans(server)) == is_lent
                assert f"uses those of {lend_bytes:,} bytes or more in place" in str(client.explain("m"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: tensor_of(X, kind="pool"), "memory pool"),
        (lambda: tensor_of(X, kind="vmm"), "virtual memory"),
        (lambda: tensor_of(X, kind="managed"), "managed"),
        (lambda: DRIVER.tensor(np.repeat(X, 2))[::2], "it is not C-contiguous"),
        (lambda: [DRIVER.tensor(X) for _ in range(2)][-1], "its allocation shares a memory block of CUDA with others"),
    ],
    ids=["pool", "vmm", "managed", "strided", "small"],
)
def test_other_memory_is_copied(server: GpuServer, client: ShmClient, given: Callable[[], Tensor], told: str) -> None:
    x = given()
    with pytest.warns(CopyWarning, match=f"input 'IN0' of model 'm' is copied on its GPU: .*{told}") as caught:
        result = client.infer("m", {"IN0": x}, outputs=ON_GPU)
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(on_host(result), 2 * X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(doubled(client, x), 2 * X)
    assert not loans(server)


def test_a_result_is_copied_unless_its_region_is_in_dev_shm(server: GpuServer, cuda: CudaAccess) -> None:
    with gpu_client(server, cuda, lend_bytes=0) as client, client.infer("m", {"IN0": X}, outputs=ON_GPU) as result:
        told = r"is copied on its GPU: .* if it is a client's result, .* PoolOptions\(region=\"system\"\)"
        with pytest.warns(CopyWarning, match=told):
            np.testing.assert_array_equal(doubled(client, result["OUT0"]), 4 * X)
        assert not loans(server)
        with pytest.raises(TensorError, match="cannot be a prepared call's memory: .* if it is a client's result, "):
            client.prepare("m", {"IN0": result["OUT0"]}, outputs=ON_GPU)
    with gpu_client(server, cuda, lend_bytes=0, region="system") as client:
        with client.infer("m", {"IN0": X}, outputs=ON_GPU) as result:
            np.testing.assert_array_equal(doubled(client, result["OUT0"]), 4 * X)
        assert loans(server)


def received() -> Tensor:
    """Return memory as torch.multiprocessing receives it: CUDA exports it only where it was allocated."""
    DRIVER.fail_next("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
    return tensor_of(X)


def test_memory_that_cannot_be_exported_is_copied(server: GpuServer, client: ShmClient) -> None:
    told = "input 'IN0' of model 'm' is copied on its GPU: CUDA refuses to export it .CUDA_ERROR_INVALID_VALUE., as"
    with pytest.warns(CopyWarning, match=told):
        np.testing.assert_array_equal(doubled(client, received()), 2 * X)
    assert not loans(server)


def test_a_tensor_is_let_go_of_with_the_answer(client: ShmClient) -> None:
    x = tensor_of(X)
    memory = weakref.ref(x.memory)
    result = client.infer("m", {"IN0": x}, outputs=ON_HOST)
    del x
    gc.collect()
    assert memory() is None
    del result


def lent(client: ShmClient, error: type[Exception] | None = None, **options: Any) -> Callable[[], object]:
    """Lend a tensor that nobody else keeps, for a call that may fail; return its memory, as long as that is kept."""
    x = tensor_of(X)
    memory = weakref.ref(x.memory)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        client.infer("m", {"IN0": x}, outputs=ON_HOST, **options).release()
    del x
    gc.collect()
    return memory


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_tensor_that_a_model_keeps_is_kept_until_it_lets_go(
    server: GpuServer, client: ShmClient, monkeypatch: pytest.MonkeyPatch, has_descriptors: bool
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    server.keeps_loans = True
    if not has_descriptors:
        server.after = lambda _: monkeypatch.setattr(os, "dup", refuse)
    memory = lent(client)
    monkeypatch.undo()
    assert memory() is not None
    server.keeps_loans, server.after = False, lambda _: None
    client.infer("m", {"IN0": X}, outputs=ON_HOST).release()  # in another slot
    assert memory() is not None
    server.let_go()
    wait_until(lambda: memory() is None)


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_closed_client_keeps_what_it_has_lent(server: GpuServer, client: ShmClient, is_forked: bool) -> None:
    pool, bank = client._memory.pool, client._memory.bank
    with server.at_work_on_the_next():
        memory = lent(client, DeadlineExceededError, timeout_s=1)
        if is_forked:
            pool.after_fork()
            bank.after_fork()
        pool.close()
        bank.collect()
        gc.collect()
        assert (memory() is None) == is_forked
    bank.collect()
    wait_until(lambda: memory() is None)


def test_a_tensor_is_kept_until_its_request_cannot_begin(server: GpuServer, client: ShmClient) -> None:
    with server.at_work_on_the_next():
        memory = lent(client, DeadlineExceededError, timeout_s=1)
        time.sleep(0.2)
        gc.collect()
        assert memory() is not None
    client.infer("m", {"IN0": tensor_of(X)}, outputs=ON_HOST).release()  # takes the slot back
    wait_until(lambda: memory() is None)


def test_a_tensor_of_a_request_that_was_refused_is_let_go_of(server: GpuServer, client: ShmClient) -> None:
    def refuse(_: object) -> None:
        raise InferenceError("the model failed")

    server.before = refuse
    memory = lent(client, InferenceError)
    server.before = lambda _: None
    wait_until(lambda: memory() is None)


def test_what_is_submitted_is_copied(server: GpuServer, client: ShmClient, stream: int) -> None:
    x = tensor_of(X)
    future = client.submit("m", {"IN0": x}, outputs=ON_GPU, cuda_stream=stream)
    x.peek()[:] = 0
    np.testing.assert_array_equal(on_host(future.result()), 2 * X)
    assert not loans(server)


def test_a_tensor_is_a_prepared_calls_memory(server: GpuServer, client: ShmClient) -> None:
    x = tensor_of(X, 64)
    with client.prepare("m", {"IN0": x}, outputs=ON_GPU) as call:
        given: Any = call.inputs["IN0"]
        assert given is x
        for times in (1, 2, 3):
            x.peek()[:] = times * X
            np.testing.assert_array_equal(on_host(call.infer()), 2 * times * X)
        assert not loans(server)
        opened = [DRIVER.count(f"cu{name}", 1) for name in ("IpcOpenMemHandle", "MemImportFromShareableHandle")]
        assert opened == [1, 1]


def test_a_prepared_calls_tensor_is_kept_until_no_model_has_it(server: GpuServer, client: ShmClient) -> None:
    x = tensor_of(X)
    memory = weakref.ref(x.memory)
    call = client.prepare("m", {"IN0": x}, outputs=ON_HOST)
    call.infer().release()
    del x
    call.close()
    del call
    gc.collect()
    assert memory() is not None
    client._memory.bank.collect()
    assert memory() is not None

    def is_gone() -> bool:
        server.sweep()  # it finds that the region is gone when the pool's own thread has destroyed that
        client._memory.bank.collect()
        return memory() is None

    wait_until(is_gone)


@pytest.mark.parametrize("kind", ["pool", "managed", "vmm", "received"])
def test_memory_that_cuda_cannot_share_is_no_prepared_calls(client: ShmClient, kind: Any) -> None:
    x = received() if kind == "received" else tensor_of(X, kind=kind)
    with pytest.raises(TensorError, match=r"input 'IN0' cannot be a prepared call's memory: .*'cuda:0'") as caught:
        client.prepare("m", {"IN0": x}, outputs=ON_HOST)
    assert caught.value.tensor == "IN0"
