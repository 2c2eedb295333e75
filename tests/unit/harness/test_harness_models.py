"""The sample models, unchanged, in a harness, called by both clients on all paths; what names mean there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, Result, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.testing.harness import ModelHarness

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
