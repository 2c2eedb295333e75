"""A harness does what a server does: the same tests run on one in tests/e2e/test_harness_contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.testing.harness import ModelHarness
from tests.conformance.backend.asking import ask, models_in
from tests.conformance.backend.backend_checks import CHECKS
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


@pytest.fixture(scope="module")
def wire_to_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessWire]:
    models = models_in(tmp_path_factory.mktemp("conformance") / "models")
    with ModelHarness.in_child(*sorted(models.iterdir())) as harness:
        wire = HarnessWire(harness)
        yield wire
        wire.close()


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.startswith(("calls.", "requests.", "responses."))]
)
def test_children_have_all_that_crosses_to_their_parent(wire_to_children: HarnessWire, check: str) -> None:
    """The whole conformance suite runs in this process, and on a real stub; see tests/conformance/backend."""
    report = ask(wire_to_children, check)
    assert not report, report
