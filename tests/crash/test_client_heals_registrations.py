"""Registrations and files of a client vanish: it makes up for them. What a model has begun with is never sent again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_shm_client
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.client import InferenceError, PoolOptions
from shm_backend_utils.client.options import PathName
from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.faults.at_hand import MortalServer

from ..e2e.eventually import eventually
from ..e2e.flavours import FLAVOURS, TWO_FLAVOURS, AnyClient, client_of, url_of
from .registered import SomebodyElse, files_of_this_process, losing_files

X = np.arange(1000, dtype=np.float32)
SHARED_PATHS: tuple[PathName, ...] = ("direct", "triton-shm")
DEEDS: dict[str, Callable[[SomebodyElse], None]] = {
    "unregister each": SomebodyElse.unregister_those_of_this_process,
    "unregister all": SomebodyElse.unregister_all,
}


@pytest.fixture(params=TWO_FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(flavour: str, triton_server: EmbeddedServer) -> str:
    return url_of(triton_server, flavour)


@pytest.fixture
def ours(flavour: str, address: str) -> Iterator[AnyClient]:
    pool = PoolOptions(region="system")  # whose files tests take away
    with client_of(flavour, address, timeout_s=30, pool=pool) as client:
        yield client


@pytest.fixture
def somebody_else(triton_server: EmbeddedServer) -> Iterator[SomebodyElse]:
    with SomebodyElse.at(triton_server) as somebody:
        yield somebody


@pytest.fixture(params=DEEDS)
def deed(request: pytest.FixtureRequest) -> Callable[[SomebodyElse], None]:
    return DEEDS[request.param]


def counts(client: AnyClient) -> Any:
    """Return how many requests came to the model, and with how many it began."""
    with client.infer("tally", {"X": X}, outputs=["COUNTS"], path="inline", parameters={"ask": 1}) as result:
        return result["COUNTS"].copy()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_unregistered_region_is_so_again(
    ours: AnyClient, somebody_else: SomebodyElse, deed: Callable[[SomebodyElse], None]
) -> None:
    ours.infer("tally", {"X": X}, path="triton-shm").release()
    before = counts(ours)
    deed(somebody_else)
    with ours.infer("tally", {"X": 2 * X}, path="triton-shm") as result:
        np.testing.assert_array_equal(result["Y"], 2 * X)
        assert result.path == "triton-shm"
    assert (counts(ours) - before).tolist() == [1, 1]


def test_a_prepared_one_too(ours: AnyClient, somebody_else: SomebodyElse, deed: Callable[[SomebodyElse], None]) -> None:
    with ours.prepare("tally", {"X": (X.shape, X.dtype)}, path="triton-shm") as call:
        call.infer().release()
        before = counts(ours)
        deed(somebody_else)
        call.inputs["X"][:] = 3 * X
        with call.infer() as result:
            np.testing.assert_array_equal(result["Y"], 3 * X)
    assert (counts(ours) - before).tolist() == [1, 1]


@pytest.mark.parametrize("path", SHARED_PATHS)
def test_memory_whose_file_somebody_removed_is_replaced(ours: AnyClient, path: PathName) -> None:
    with losing_files():
        ours.infer("tally", {"X": X}, path=path).release()
    runs = counts(ours)
    with ours.infer("tally", {"X": 2 * X}, path=path) as result:
        np.testing.assert_array_equal(result["Y"], 2 * X)
        assert result.path == path
    assert (counts(ours) - runs)[1] == 1


def test_a_prepared_call_that_lost_its_file_says_so(ours: AnyClient) -> None:
    before = files_of_this_process()
    with ours.prepare("tally", {"X": (X.shape, X.dtype)}, path="direct") as call:
        call.infer().release()
        lost = files_of_this_process() - before
        for file in lost:
            file.unlink()
        with pytest.raises(InferenceError, match="shm_slot.*prepare another call") as failure:
            call.infer()
        assert not any(file.name in str(failure.value) for file in lost)


def test_a_client_that_closes_leaves_what_is_others(flavour: str, address: str, somebody_else: SomebodyElse) -> None:
    strangers = shared_memory.create_shared_memory_region("a strangers", "/strangers", 64)
    try:
        somebody_else.grpc.register_system_shared_memory("a strangers", "/strangers", 64)
        with client_of(flavour, address) as client:
            for path in SHARED_PATHS:
                client.infer("tally", {"X": X}, path=path).release()
            assert somebody_else.registered_by_this_process()
        assert somebody_else.registered() == {"a strangers"}
        somebody_else.grpc.unregister_system_shared_memory("a strangers")
    finally:
        shared_memory.destroy_shared_memory_region(strangers)


def test_memory_that_made_room_is_unregistered(flavour: str, address: str, somebody_else: SomebodyElse) -> None:
    with client_of(flavour, address, pool=PoolOptions(max_bytes=1 << 18)) as client:
        for length in (1000, 10_000, 50_000):
            client.infer("identity", {"INPUT0": np.zeros(length, np.float32)}, path="triton-shm").release()
            assert len(somebody_else.registered_by_this_process()) == 1
    assert not somebody_else.registered_by_this_process()


def test_memory_that_lay_idle_goes_with_the_next_call(flavour: str, address: str, somebody_else: SomebodyElse) -> None:
    with client_of(flavour, address, pool=PoolOptions(idle_s=0.05)) as client:
        before = files_of_this_process()
        client.infer("tally", {"X": X}, path="triton-shm").release()
        eventually(lambda: files_of_this_process() == before)
        client.infer("tally", {"X": X}, path="triton-shm").release()
        assert len(somebody_else.registered_by_this_process()) == 1
    assert not somebody_else.registered_by_this_process()


PATHS: tuple[PathName, ...] = ("direct", "triton-shm", "inline")
# What errors say that do lead to another attempt; here they are a model's own, say of another model that it called.
MESSAGES = {
    "plain": "the model gave up",
    "unknown region": "Unable to find shared memory region: 'somebodys'",
    "refused region": "shm:refused: shm_slot refused: the token is not the region's",
    "refused request": "shm:stale: request parameter shm_generation is not the slot's",
}


@pytest.mark.parametrize(
    ("message", "fail", "path"),
    [
        *(
            (message, fail, path)
            for (message, fail), path in zip(
                itertools.product(MESSAGES, ["half way", "at the end"]), itertools.cycle(PATHS), strict=False
            )
        ),
        *(("plain", "before it begins", path) for path in PATHS),
    ],
)
def test_a_model_that_fails_has_run_once_at_most(ours: AnyClient, path: PathName, message: str, fail: str) -> None:
    before = counts(ours)
    with pytest.raises(InferenceError) as failure:
        ours.infer("tally", {"X": X}, path=path, parameters={"fail": fail, "message": MESSAGES[message]})
    assert MESSAGES[message] in str(failure.value)
    assert (counts(ours) - before).tolist() == [1, fail != "before it begins"]


@pytest.mark.parametrize("fails", [False, True], ids=["serves", "fails"])
def test_a_request_whose_memory_was_lost_is_sent_again_and_begun_once(ours: AnyClient, fails: bool) -> None:
    with losing_files():
        ours.infer("tally", {"X": X}, path="direct").release()
    before, retries = counts(ours), ours.stats().retries
    if fails:
        with pytest.raises(InferenceError, match="the model gave up"):
            ours.infer("tally", {"X": X}, path="direct", parameters={"fail": "half way"})
    else:
        ours.infer("tally", {"X": X}, path="direct").release()
    assert (counts(ours) - before).tolist() == [2, 1]
    assert ours.stats().retries == retries + 1


# Registered models, whose server is killed and comes back

MODELS = Path(__file__).resolve().parents[1] / "models"
ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)
N = np.full((10, 1), 2)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> Iterator[MortalServer]:
    models = copy_models((MODELS / "rows", MODELS / "ordinary"), tmp_path_factory.mktemp("mortal") / "models")
    with MortalServer(models, **options | {"log_file": models.with_name("server.log")}) as mortal:
        yield mortal


def register(client: Any) -> None:
    inputs = [("X", (4,), np.float32), ("N", (1,), np.int64)]
    client.register_shm_model("rows", inputs[:1], [("DOUBLED", (4,), np.float32)], 4, 2)
    client.register_shm_model("ordinary", inputs, [("Y", (4,), np.float32)], 4, 2)


def infer(client: Any) -> None:
    np.testing.assert_array_equal(client.infer_shm("rows", {"X": ROWS})["DOUBLED"], ROWS * 2)
    np.testing.assert_array_equal(client.infer_shm("ordinary", {"X": ROWS, "N": N})["Y"], ROWS * 2)


def is_answered(client: TritonSHMClient) -> bool:
    try:
        infer(client)
    except InferShmError:
        return False
    return True


def test_registered_models_outlive_the_server(mortal: MortalServer) -> None:
    with TritonSHMClient(mortal.server.grpc_url) as client, TritonSHMClient(mortal.server.grpc_url) as idle:
        register(client)
        register(idle)
        infer(client)
        infer(idle)
        mortal.kill()
        for model, inputs in (("rows", {"X": ROWS}), ("ordinary", {"X": ROWS, "N": N})):
            with pytest.raises(InferShmError) as caught:
                client.infer_shm(model, inputs, client_timeout=30)
            assert isinstance(caught.value.__cause__, ConnectionError)
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
        mortal.come_back()
        eventually(lambda: is_answered(client))
        infer(client)
        eventually(lambda: is_answered(idle))


def test_what_somebody_else_unregisters_is_registered_again(mortal: MortalServer) -> None:
    """The original's model fails from then on."""
    with (
        SomebodyElse.at(mortal.server) as somebody,
        TritonSHMClient(mortal.server.grpc_url) as ours,
        triton_shm_client.TritonSHMClient(mortal.server.grpc_url) as theirs,
    ):
        register(ours)
        register(theirs)
        infer(ours)
        infer(theirs)
        somebody.unregister_all()
        infer(ours)
        with pytest.raises((RuntimeError, InferenceServerException), match="Unable to find shared memory region"):
            theirs.infer_shm("ordinary", {"X": ROWS[:4], "N": N[:4]})
