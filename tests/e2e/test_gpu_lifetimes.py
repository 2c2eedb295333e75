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
from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.testing.fake_cuda.driver import LiveCounts
from tests.crash.gate import Gate
from tests.crash.processes import stub_of
from tests.crash.server_options import installation_with

from .eventually import eventually
from .fake_gpus import Gpu, X, content_of, flavour_of, gpu_of, left_here

MODELS = Path(__file__).resolve().parents[1] / "models"
NOTHING = LiveCounts()


def infer(gpu: Gpu, deed: str = "double", device: int = 0, to: int | None = None, **options: Any) -> Result:
    where = (X.shape, X.dtype, f"cuda:{device if to is None else to}")
    return gpu.infer(deed, gpu.array(X, device), where, path="direct", **options)


def is_doubled(array: Any) -> bool:
    return bool((content_of(array) == X * 2).all())


# In the model


def test_memory_is_closed_and_freed_when_nobody_has_used_it_for_a_while(triton_server: EmbeddedServer) -> None:
    with gpu_of(flavour_of(triton_server), pool=PoolOptions(idle_s=0)) as gpu:
        before = gpu.told().open_now
        infer(gpu).release()
        eventually(lambda: gpu.told("sweep").open_now == before)
        eventually(lambda: left_here() == NOTHING)


# In the client


# While a model still writes


def test_memory_that_a_gpu_still_writes_to_is_neither_closed_nor_freed(
    triton_server: EmbeddedServer, gate: Gate
) -> None:
    gate.close()
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
