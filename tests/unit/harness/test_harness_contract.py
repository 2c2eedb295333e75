"""A harness does what a server does: the same tests run on one in tests/e2e/test_harness_contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.testing.harness import ModelHarness
from tests.unit.harness.contract import Contract
from tests.unit.harness.regions_contract import RegionsContract
from tests.unit.harness.wires import MODELS, HarnessWire


@pytest.fixture(scope="module", params=[ModelHarness, ModelHarness.in_child], ids=["in process", "in children"])
def wire(request: pytest.FixtureRequest) -> Iterator[HarnessWire]:
    with request.param(*sorted(folder for folder in MODELS.iterdir() if folder.is_dir())) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


class TestHarness(Contract, RegionsContract):
    """In this process, and in children."""
