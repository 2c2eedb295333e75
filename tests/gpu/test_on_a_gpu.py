"""What ``scripts/gpu_check`` checks, without its figures, on the GPU of this machine; all skipped if there is none."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from scripts.tools.gpu_check.gpu import Gpu, load_gpu
from scripts.tools.gpu_check.measuring import SMALL
from scripts.tools.gpu_check.processes.checks import CHECKS
from scripts.tools.gpu_check.processes.client import Client, ModelProcess
from scripts.tools.gpu_check.processes.figures import many_requests
from scripts.tools.gpu_check.report import Outcome, Report, SkippedError
from scripts.tools.gpu_check.server.checks import find_server
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.cuda.memory import CudaAccess

try:
    CudaAccess().runtime.device_count()
except MachineError as error:
    pytest.skip(f"no GPU was tested: {error}", allow_module_level=True)

from scripts.tools.gpu_check.server.calls import CHECKS as CALLS
from scripts.tools.gpu_check.server.client import running_server
from scripts.tools.gpu_check.server.native import CHECKS as NATIVE_CALLS
from scripts.tools.gpu_check.server.shm_util import CHECKS as SHM_UTIL_CALLS

SERVER_CHECKS = {**CALLS, **NATIVE_CALLS, **SHM_UTIL_CALLS}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return load_gpu()


@pytest.fixture(scope="module")
def client(gpu: Gpu) -> Iterator[Client]:
    with ModelProcess(load_gpu) as model:
        yield Client(gpu, model)


@pytest.fixture(scope="module")
def outcomes(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """How the checks with a server ended. It has stopped then, so that no test leaves memory in use."""
    try:
        installation = find_server(None)
    except SkippedError as reason:
        pytest.skip(str(reason))
    report = Report("tests", {}, tmp_path_factory.mktemp("gpu"), is_fake=False)
    with running_server(gpu, installation) as server:
        return {name: report.run("", name, functools.partial(check, server)) for name, check in SERVER_CHECKS.items()}


@pytest.mark.parametrize("name", CHECKS)
def test_between_two_processes(client: Client, name: str) -> None:
    try:
        CHECKS[name](client)
    except SkippedError as reason:
        pytest.skip(str(reason))


def test_many_requests_leave_nothing_behind(client: Client) -> None:
    many_requests(client, SMALL)


@pytest.mark.parametrize("name", SERVER_CHECKS)
def test_with_a_server(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    if outcome.status == "SKIP":
        pytest.skip(outcome.detail)
    assert outcome.status == "PASS", f"{outcome.detail}\n{outcome.trace}"
