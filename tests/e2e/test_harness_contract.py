"""A server does what a harness does: the same tests run on harnesses in tests/unit/harness/test_harness_contract.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm_backend_utils.cli.common.server import copy_models
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_models_without_sessions
from tests.unit.harness.contract import Contract
from tests.unit.harness.regions_contract import RegionsContract
from tests.unit.harness.wires import MODELS, ServerWire


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWire]:
    folder = tmp_path_factory.mktemp("contract")
    copy_models((each for each in MODELS.iterdir() if each.is_dir()), folder / "models")
    with EmbeddedServer.start(folder / "models", log_file=folder / "server.log") as server:
        wire = ServerWire(server.grpc_url)
        yield wire
        wire.close()


@has_models_without_sessions
@pytest.mark.needs_triton("2.51", "the harness does what 2.51 does")
class TestServer(Contract, RegionsContract):
    """A real one, whose models have a NumPy that its stub was built for."""
