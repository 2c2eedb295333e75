"""A client of registered models is tritonclient's client, too. Its memory: how much, whose, and that none is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from shm_backend_utils.client import DeadlineExceededError
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.errors import ClosedError, MachineError
from shm_backend_utils.server import EmbeddedServer

from .eventually import eventually
from .loading_server import MODELS, LoadingServer
from .own_regions import own_regions
from .two_classes import FACTS, LATE_WRITER, ORDINARY, ROWS, Declared, x_of

SHM = Path("/dev/shm")
BOTH_KINDS = pytest.mark.parametrize("declared", [ROWS, ORDINARY], ids=["with a ShmSession", "ordinary"])
INPUTS: dict[str, Any] = {"X": x_of(10), "N": np.ones((10, 1))}
DELAY_US = 300_000


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[TritonSHMClient]:
    with TritonSHMClient(triton_server.grpc_url) as client:
        yield client


def regions() -> set[str]:
    return {region.key for region in own_regions()}


def registered(server: EmbeddedServer, pid: int) -> set[str]:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        known = client.get_system_shared_memory_status(as_json=True).get("regions", {})
    return {name for name in known if name.startswith(f"shmbu-{pid}-")}


def infer(client: TritonSHMClient, declared: Declared, **named: Any) -> dict[str, Any]:
    return client.infer_shm(declared.model, {name: INPUTS[name] for name, _, _ in declared.inputs}, **named)


def infer_late(client: TritonSHMClient, value: int, delay_us: int, **named: Any) -> Any:
    return client.infer_shm("late_writer", {"VALUE_AND_DELAY_US": [value, delay_us]}, **named)["VALUES"]


@BOTH_KINDS
def test_all_memory_is_taken_at_once_and_no_more(client: TritonSHMClient, declared: Declared) -> None:
    """Counted when all have answered: to count keeps alive what calls under way let go of. A region more would stay."""
    declared.but(pool_size=3).register(client)
    taken = regions()
    assert len(taken) == 3
    assert infer(client, declared)  # the first call tries, with a page of its own, whether the server shares memory
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: infer(client, declared), range(40)))
    assert regions() == taken


ENDS: dict[str, Callable[[TritonSHMClient, str], None]] = {
    "unregister": lambda client, model: client.unregister_shm_model(model),
    "clean up": lambda client, model: client.cleanup_all_shm(),
    "close": lambda client, model: client.close(),
    "with": lambda client, model: client.__exit__(None, None, None),
}


@BOTH_KINDS
def test_when_it_ends_nothing_is_left(triton_server: EmbeddedServer, declared: Declared) -> None:
    for end, do in ENDS.items():
        client = TritonSHMClient(triton_server.grpc_url)
        declared.register(client)
        infer(client, declared)
        assert regions()
        do(client, declared.model)
        assert regions() == set(), end
        assert registered(triton_server, os.getpid()) == set(), end
        client.close()
        with pytest.raises(ClosedError):
            declared.register(client)


@BOTH_KINDS
def test_clients_that_are_garbage_keep_no_memory_nor_threads(triton_server: EmbeddedServer, declared: Declared) -> None:
    def leave() -> dict[str, Any]:
        client = TritonSHMClient(triton_server.grpc_url)
        declared.register(client)
        infer(client, declared)  # as many requests at once as it may
        return client.registered_models

    def close(*left: dict[str, Any]) -> None:
        assert regions() == set()
        for models in left:
            for model in models.values():
                model.close()  # as at exit
        assert registered(triton_server, os.getpid()) == set()

    close(leave())
    gc.collect()
    before = threading.active_count()
    left = [leave() for _ in range(5)]
    eventually(lambda: threading.active_count() <= before)
    close(*left)


def test_of_threads_that_register_the_same_model_one_does(client: TritonSHMClient) -> None:
    def register(_: int) -> bool:
        try:
            ROWS.register(client)
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(register, range(4))) == 1
    assert len(regions()) == ROWS.pool_size


def test_a_machine_with_too_little_memory_says_so_at_once(client: TritonSHMClient) -> None:
    space = os.statvfs(SHM)
    rows = space.f_blocks * space.f_frsize // 16
    with pytest.raises(MachineError):
        ROWS.but(max_batch_size=rows).register(client)
    assert regions() == set()
    assert client.registered_models == {}
    ROWS.register(client)
    assert infer(client, ROWS)


def test_memory_that_a_late_model_writes_to_is_nobody_elses(client: TritonSHMClient) -> None:
    """The original gives it to the next request at once.

    The deadline comes long before the answer: before 24.12, Triton may crash if they come together (its issue 7368).
    """
    LATE_WRITER.register(client)
    for value in range(1, 6):
        with pytest.raises(InferShmError) as caught:
            infer_late(client, -value, DELAY_US // 3, client_timeout=0.02)
        assert isinstance(caught.value.__cause__, DeadlineExceededError)
        for _ in range(3):
            assert (infer_late(client, value, 0) == value).all()


class Meeting:
    """A number, the reading of which waits until as many threads read it as it expects."""

    shape = ()

    def __init__(self, thread_count: int) -> None:
        self._barrier = threading.Barrier(thread_count, timeout=20)

    def __float__(self) -> float:
        self._barrier.wait()
        return 1.0


def test_as_many_calls_as_the_pool_has_room_for_run_at_once(client: TritonSHMClient) -> None:
    FACTS.but(pool_size=5).register(client)
    meeting = Meeting(5)
    with ThreadPoolExecutor(5) as threads:
        answers = [threads.submit(client.infer_shm, "call_facts", {"X": [meeting]}) for _ in range(5)]
        assert all(answer.result() for answer in answers)


@pytest.mark.parametrize("end", ["unregister", "clean up", "close"])
def test_a_call_fails_when_its_model_is_unregistered(triton_server: EmbeddedServer, tmp_path: Path, end: str) -> None:
    """The original unmaps the memory, and dies when the answer comes."""
    note = tmp_path / "note"
    client = TritonSHMClient(triton_server.grpc_url)
    FACTS.register(client)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.infer_shm, "call_facts", {"X": [0] * 10}, parameters={"note": str(note)})
        eventually(note.exists)
        ENDS[end](client, "call_facts")
        with pytest.raises(InferShmError):
            answer.result(20)
    assert regions() == set()
    client.close()


RUNNING_SUM = Declared("running_sum", [("X", (), np.float32)], [("SUM", (), np.float32)], 1, pool_size=4)


def test_it_is_tritonclients_client(client: TritonSHMClient) -> None:
    assert isinstance(client, tritonclient.grpc.InferenceServerClient)
    assert client.is_server_live()
    assert client.is_model_ready("rows")
    tensor = tritonclient.grpc.InferInput("X", [2, 4], "FP32")
    tensor.set_data_from_numpy(x_of(2))
    np.testing.assert_array_equal(client.infer("rows", [tensor]).as_numpy("DOUBLED"), x_of(2) * 2)


def test_a_verbose_client_prints_its_calls(triton_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
    channel_args = [("grpc.max_send_message_length", -1)]
    with TritonSHMClient(triton_server.grpc_url, channel_args=channel_args, verbose=True) as client:
        ROWS.register(client)
        client.infer_shm("rows", {"X": x_of(9)})
    assert "infer_shm, model rows, {'DOUBLED': (9, 4)}" in capsys.readouterr().out


class SlowNumber:
    """A number that takes long to read, so that what comes behind it would overtake it."""

    shape = ()

    def __float__(self) -> float:
        time.sleep(0.2)
        return 1.0


def test_the_rows_of_a_sequence_are_sent_in_order(client: TritonSHMClient) -> None:
    RUNNING_SUM.register(client)
    client.infer_shm("running_sum", {"X": [0]}, sequence_id=71, sequence_start=True)
    sums = client.infer_shm("running_sum", {"X": [SlowNumber(), *range(2, 50)]}, sequence_id=71)["SUM"]
    client.infer_shm("running_sum", {"X": [0]}, sequence_id=71, sequence_end=True)
    np.testing.assert_array_equal(sums, np.cumsum(np.arange(1, 50)))


def test_a_model_may_be_registered_before_it_is_loaded(loading_server: LoadingServer) -> None:
    with TritonSHMClient(loading_server.server.grpc_url) as client:
        declared = ROWS.but(model="rows_to_come")
        declared.register(client)
        with pytest.raises(InferShmError, match="unknown model"):
            client.infer_shm("rows_to_come", {"X": x_of(9)})
        loading_server.load("rows_to_come", "rows", (MODELS / "rows" / "config.pbtxt").read_text())
        for count in (1, 9):  # the first makes memory for one row, which is too little for the next
            results = client.infer_shm("rows_to_come", {"X": x_of(count)})
            np.testing.assert_array_equal(results["DOUBLED"], x_of(count) * 2)
        loading_server.load_anew("rows_to_come")
        assert client.infer_shm("rows_to_come", {"X": x_of(9)})
        loading_server.grpc.unload_model("rows_to_come")
        with pytest.raises(InferShmError):
            client.infer_shm("rows_to_come", {"X": x_of(9)})
