"""The sample models, unchanged, in a harness, called by both clients on all paths; what names mean there."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2
from tritonclient.utils import shared_memory

from shm_backend_utils.client import AsyncShmClient, Result, ShmClient
from shm_backend_utils.client.errors import InferenceError
from shm_backend_utils.client.options import PathName
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.harness.folders import folder_of
from tests.unit.harness.wires import HarnessWire

MODELS = Path(__file__).resolve().parents[3] / "model_repository"
NAMES = ("identity", "multiply", "add_sub", "text_upper", "batch_statistics", "frames")
RANDOM = np.random.default_rng(7)
IMAGES = RANDOM.random((2, 3, 224, 224), np.float32)
ROWS = np.arange(32, dtype=np.int32).reshape(2, 16)
CASES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "identity": ({"INPUT0": np.arange(5, dtype=np.float32)}, {"OUTPUT0": np.arange(5, dtype=np.float32)}),
    "multiply": ({"INPUT0": IMAGES}, {"OUTPUT0": IMAGES * 2}),
    "add_sub": ({"INPUT0": ROWS, "INPUT1": ROWS[::-1]}, {"OUTPUT0": ROWS + ROWS[::-1], "OUTPUT1": ROWS - ROWS[::-1]}),
    "text_upper": ({"TEXT": ["über", "b"]}, {"UPPER": np.array(["ÜBER".encode(), b"B"], object)}),
    "batch_statistics": ({"IMAGE": IMAGES}, {"MEAN": IMAGES.mean(axis=(2, 3)), "STD": IMAGES.std(axis=(2, 3))}),
}
PATHS: Sequence[PathName] = ("direct", "triton-shm", "inline")


@pytest.fixture(scope="module")
def in_children() -> Iterator[ModelHarness]:
    with ModelHarness.in_child(*[MODELS / name for name in NAMES]) as harness:
        yield harness


@pytest.fixture
def in_process() -> Iterator[ModelHarness]:
    """Its models keep what they have mapped until they are finalized."""
    with ModelHarness(*[MODELS / name for name in NAMES]) as harness:
        yield harness


@pytest.fixture(params=["in_process", "in_children"])
def harness(request: pytest.FixtureRequest) -> ModelHarness:
    harness: ModelHarness = request.getfixturevalue(request.param)
    return harness


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", CASES)
def test_clients_call_them_and_requests_need_none(harness: ModelHarness, model: str, path: PathName) -> None:
    inputs, expected = CASES[model]

    def check(result: Result) -> None:
        assert result.path == path
        for name, array in expected.items():
            np.testing.assert_array_equal(result[name], array)
        result.release()

    async def call() -> None:
        async with AsyncShmClient(harness) as client:
            check(await client.infer(model, inputs, path=path))

    with ShmClient(harness) as client:
        check(client.infer(model, inputs, path=path))
    asyncio.run(call())
    outputs = harness.infer(inputs, model=model)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


@pytest.mark.parametrize("path", ["direct", "inline"])
def test_streams_come_as_they_are_made(harness: ModelHarness, path: PathName) -> None:
    image = RANDOM.integers(0, 255, (300, 300, 3), np.uint8)

    async def tiles() -> list[tuple[int, ...]]:
        async with AsyncShmClient(harness) as client:
            return [each["TILE"].shape async for each in client.stream("frames", {"IMAGE": image}, path=path)]

    with ShmClient(harness) as client:
        found = [each["TILE"].shape for each in client.stream("frames", {"IMAGE": image}, path=path)]
    assert found == [(256, 256, 3), (256, 44, 3), (44, 256, 3), (44, 44, 3)]
    assert asyncio.run(tiles()) == found


def test_a_pipeline_calls_its_models() -> None:
    image = RANDOM.integers(0, 255, (224, 224, 3), np.uint8)
    pytest.importorskip("cv2")
    names = ("pipeline", "image_resize_normalize", "batch_statistics")
    with ModelHarness(*[MODELS / name for name in names]) as harness, ShmClient(harness) as client:
        results = [client.infer("pipeline", {"IMAGE": image}, path=path) for path in PATHS]
        for result in results:
            assert result["MEAN"].shape == (1, 3)
            np.testing.assert_array_equal(result["MEAN"], results[0]["MEAN"])


def test_memory_is_really_shared_with_children(tmp_path: Path) -> None:
    model = tmp_path / "writes"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(
        (MODELS / "identity" / "config.pbtxt").read_text().replace("OUTPUT0", "PID").replace("TYPE_FP32", "TYPE_INT64")
    )
    (model / "1" / "model.py").write_text(
        "import os\n"
        "import numpy as np\n"
        "from shm_backend_utils.model import ShmSession\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args): self.session = ShmSession.from_args(args)\n"
        "    def execute(self, requests): return self.session.serve(requests, self.infer)\n"
        "    def finalize(self): self.session.close()\n"
        "    def infer(self, call):\n"
        "        call.output('PID', (1,), np.int64).numpy()[0] = os.getpid()\n"
        "        assert call.input('INPUT0').numpy().sum() == self.__dict__.setdefault('seen', 0) * 7\n"
        "        self.seen += 1\n"
    )
    with ModelHarness.in_child(model) as harness, ShmClient(harness) as client:
        shape = ((7,), np.int64)
        with client.prepare("writes", {"INPUT0": shape}, outputs={"PID": ((1,), np.int64)}, path="direct") as call:
            for value in range(3):  # what is written in place here is what the child reads
                call.inputs["INPUT0"][:] = value
                result = call.infer()
                assert result["PID"][0] not in (0, os.getpid())
                assert result.bytes_avoided > 0
                result.release()


def test_harnesses_leave_the_process_as_it_was() -> None:
    before = set(sys.modules), list(sys.path)
    with ModelHarness(MODELS / "identity") as outer:
        with ModelHarness(MODELS / "text_upper"):
            pass
        assert outer.infer(CASES["identity"][0]).keys() == {"OUTPUT0"}
    gone = {name for name in set(sys.modules) - before[0] if "model" in name and name.startswith("_")}
    assert gone == set()
    assert "triton_python_backend_utils" not in sys.modules or "triton_python_backend_utils" in before[0]
    assert sys.path == before[1]


def test_the_users_own_entry_of_the_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "class TritonPythonModel: pass\n")
    own = [str(folder), str(folder / "1"), *sys.path]
    monkeypatch.setattr(sys, "path", list(own))
    with ModelHarness(folder):
        assert len(sys.path) == len(own) + 2
    assert sys.path == own


IDENTITY = Path(__file__).resolve().parents[3] / "model_repository" / "identity"
ROW = 64
PAGE = 4096
STEPS = 150


@pytest.fixture(params=[ModelHarness, ModelHarness.in_child], ids=["in process", "in a child"])
def wire(request: pytest.FixtureRequest) -> Iterator[HarnessWire]:
    with request.param(IDENTITY) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.fixture
def keys() -> Iterator[dict[str, Any]]:
    made = [f"/harness-{secrets.token_hex(6)}" for _ in range(3)]
    handles = {key: shared_memory.create_shared_memory_region(key, key, PAGE, create_only=True) for key in made}
    yield handles
    for handle in handles.values():
        shared_memory.destroy_shared_memory_region(handle)


def test_names_mean_what_they_mean_now(wire: HarnessWire, keys: dict[str, Any]) -> None:
    chance = random.Random(7)
    names, meanings = [f"name-{secrets.token_hex(4)}" for _ in range(2)], dict[str, str]()
    for number, handle in enumerate(keys.values()):
        begin(handle)[:] = number
    for _ in range(STEPS):
        name = chance.choice(names)
        if meanings.pop(name, None) is not None:
            wire.send("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name))
        if chance.random() < 0.8:
            key = chance.choice([key for key in keys if key not in meanings.values()])
            order = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=PAGE)
            assert wire.send("SystemSharedMemoryRegister", order).status == "OK"
            meanings[name] = key
        source, target = chance.choice(names), chance.choice(names)
        x, y = InferInput("INPUT0", [ROW // 4], "FP32"), InferRequestedOutput("OUTPUT0")
        x.set_shared_memory(source, ROW)
        y.set_shared_memory(target, ROW, ROW)
        parameters: Any = attach("identity", [x], [y])["parameters"]
        try:
            wire.harness.infer({}, outputs=["OUTPUT0"], parameters=parameters)
        except InferenceError as error:
            assert "not registered" in str(error)  # noqa: PT017  # an error is one of two right answers
            assert not {source, target} <= meanings.keys()
            continue
        assert {source, target} <= meanings.keys()
        written = begin(keys[meanings[target]], ROW)
        assert written.tolist() == [list(keys).index(meanings[source])] * (ROW // 4)
        written[:] = -1


def begin(handle: Any, offset: int = 0) -> Any:
    """Return the first numbers of an object, as it has them now."""
    return shared_memory.get_contents_as_numpy(handle, np.float32, [ROW // 4], offset)
