"""What every test here starts from: models in a harness, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.model.mapping import resolver
from shm_backend_utils.testing.harness import ModelHarness
from tests.e2e.flavours import AnyClient, Flavour

ROOT: Final = Path(__file__).resolve().parents[2]
REPOSITORIES: Final = (ROOT / "tests" / "models", ROOT / "model_repository")
SWEEP_INTERVAL_S: Final = 0.01
"""How soon a model gives a closed client's memory back: every test is asked whether it leaves any."""


@pytest.fixture(scope="module")
def harness(request: pytest.FixtureRequest) -> Iterator[ModelHarness]:
    """The models that the module names as ``MODELS``, in this process."""
    folders = [folder / name for name in request.module.MODELS for folder in REPOSITORIES if (folder / name).is_dir()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolver, "SWEEP_INTERVAL_S", SWEEP_INTERVAL_S)
        with ModelHarness(*folders) as harness:
            yield harness


@pytest.fixture(params=["blocking", "aio"])
def flavour(request: pytest.FixtureRequest, harness: ModelHarness, region: RegionName) -> Flavour:
    """The two clients, to be made by the test with options of its own; without ``--all``, each test has one of them."""
    return Flavour(harness, request.param == "aio", region)


@pytest.fixture
def client(flavour: Flavour) -> Iterator[AnyClient]:
    """Return one of them; as most tests are about shared memory, no call is too small for it."""
    with flavour.client() as client:
        yield client
