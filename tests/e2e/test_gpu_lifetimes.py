"""Memory of GPUs is open in the model as long as it is needed, and freed by the client when no model can use it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from shm_backend_utils.client import PoolOptions, Result
from shm_backend_utils.errors import ClosedError
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.crash.gate import Gate
from tests.crash.processes import stub_of
from tests.crash.server_options import installation_with

from .eventually import all_memory_comes_back, eventually
from .fake_gpus import MODEL, Gpu, X, ask, content_of, flavour_of, gpu_of, left_here

MODELS = Path(__file__).resolve().parents[1] / "models"
NOTHING = LiveCounts()


@pytest.fixture
def gpu(triton_server: EmbeddedServer) -> Iterator[Gpu]:
    with gpu_of(flavour_of(triton_server)) as gpu:
        yield gpu


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    gate = Gate(tmp_path)
    gate.close()
    return gate


def infer(gpu: Gpu, deed: str = "double", device: int = 0, to: int | None = None, **options: Any) -> Result:
    where = (X.shape, X.dtype, f"cuda:{device if to is None else to}")
    return gpu.infer(deed, gpu.array(X, device), where, path="direct", **options)


def is_doubled(array: Any) -> bool:
    return bool((content_of(array) == X * 2).all())


# In the model


def test_memory_stays_open_while_its_client_may_use_it_again(gpu: Gpu) -> None:
    before = gpu.told()
    for _ in range(3):
        infer(gpu).release()
        gpu.told("sweep")
    after = gpu.told()
    assert after.opens == before.opens + 1
    assert after.open_now == before.open_now + 1


def test_memory_is_closed_and_freed_when_nobody_has_used_it_for_a_while(triton_server: EmbeddedServer) -> None:
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(idle_s=0)) as gpu:
        before = gpu.told().open_now
        infer(gpu).release()
        eventually(lambda: gpu.told("sweep").open_now == before)
        eventually(lambda: left_here() == NOTHING)


def test_memory_that_the_model_keeps_is_neither_closed_nor_freed(gpu: Gpu) -> None:
    before = gpu.told().open_now
    infer(gpu, "keep").release()
    gpu.client.close()
    assert gpu.told("sweep").open_now == before + 1
    assert left_here().allocations == 1
    assert ask(MODEL, gpu.url, "tell_what_was_kept") == X.tolist()
    assert gpu.told("let_go").open_now == before


# In the client


def test_results_outlive_the_client(gpu: Gpu) -> None:
    with infer(gpu) as result:
        y: Any = result["Y"]
    gpu.client.close()
    gpu.told("let_go")
    assert is_doubled(y)
    assert left_here().allocations == 1


# While a model still writes


def test_a_client_that_closes_frees_nothing_that_a_model_works_in(gpu: Gpu, gate: Gate) -> None:
    before = gpu.told()
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(infer, gpu, "double_behind_the_gate", deed_with=gate.parameters(""))
        gate.wait_for_model()
        gpu.client.close()
        assert left_here().allocations >= 1
        gate.let_go()
        with pytest.raises(ClosedError):
            call.result()
        del call
    assert gpu.told("sweep")[3:6] == (before.launched + 1, before.finished + 1, before.open_now)


def test_memory_that_a_gpu_still_writes_to_is_neither_closed_nor_freed(
    triton_server: EmbeddedServer, gate: Gate
) -> None:
    """The model has answered, and left it to its client to wait for the GPU; but the client closes."""
    with gpu_of(flavour_of(triton_server), "fake_gpu_events") as gpu:
        infer(gpu).release()  # from now on the model has events
        gpu.infer(
            "launch_what_waits_at_the_gate",
            gpu.kept_array(X),
            (X.shape, X.dtype, "cuda:0"),
            deed_with=gate.parameters(""),
            stream=gpu.streams[0],
            path="direct",
        ).release()
        gate.wait_for_model()
        gpu.client.close()
        with ThreadPoolExecutor(1) as thread:
            swept = thread.submit(gpu.told, "sweep")
            wait([swept], timeout=1)  # a model that waits for the GPU before it closes anything cannot have answered
            assert left_here().allocations >= 1
            gate.let_go()
            told = swept.result()
        eventually(lambda: gpu.told().finished == told.launched)


# When the model goes


@dataclass(frozen=True)
class Loader:
    """A server that loads and unloads models when it is told to."""

    server: EmbeddedServer
    grpc: Any

    def load(self, model: str) -> None:
        self.grpc.load_model(model)

    def unload(self, model: str) -> None:
        """Unload a model; its process has ended when this returns."""
        self.grpc.unload_model(model)
        eventually(lambda: stub_of(self.server, model) is None)

    def log(self) -> str:
        return self.server.log_file.read_text(errors="replace")


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    folder = tmp_path_factory.mktemp("loader")
    for model in ("fake_gpu", "fake_gpu_events", "fake_gpu_pinned"):
        shutil.copytree(MODELS / model, folder / "models" / model, ignore=shutil.ignore_patterns("__pycache__"))
    loaded = ["--load-model=fake_gpu_pinned", "--load-model=fake_gpu_events"]
    options = ["--model-control-mode=explicit", "--disable-auto-complete-config", *loaded]
    installation = installation_with(options, folder / "installation")
    with EmbeddedServer.start(folder / "models", installation=installation, log_file=folder / "log") as server:
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        yield Loader(server, grpc)
        grpc.close()


def test_a_model_that_is_unloaded_closes_everything_and_one_that_is_loaded_opens_it_again(loader: Loader) -> None:
    with gpu_of(flavour_of(loader.server), "fake_gpu_pinned") as gpu:
        infer(gpu).release()
        loader.unload("fake_gpu_pinned")
        assert f"became {NOTHING}, []" in loader.log()
        loader.load("fake_gpu_pinned")
        with infer(gpu) as result:
            assert is_doubled(result["Y"])
        assert (gpu.told().opens, gpu.allocations) == (1, 1)


def test_memory_whose_last_user_is_gone_with_its_events_serves_others(loader: Loader, gate: Gate) -> None:
    """A call got no answer. Its model came to its end nevertheless, left an event to wait for, and was unloaded."""
    flavour = flavour_of(loader.server)
    with gpu_of(flavour, "fake_gpu_events") as another:
        infer(another).release()  # from now on the model has events
    with gpu_of(flavour, "fake_gpu_pinned") as gpu:
        with pytest.raises(TimeoutError):
            gpu.client.infer(
                "fake_gpu_events",
                {"X": gpu.array(X)},
                outputs={"Y": (X.shape, X.dtype, "cuda:0")},
                timeout_s=0.5,
                parameters={"deed": "double_behind_the_gate", **gate.parameters("")},
            )
        gate.wait_for_model()
        gate.let_go()
        all_memory_comes_back(gpu.client)
        loader.unload("fake_gpu_events")
        with infer(gpu) as result:
            assert is_doubled(result["Y"])
