"""What ``scripts/gpu_check`` checks, without its figures, on the GPU of this machine; all skipped if there is none."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from scripts.tools.gpu_check.gpu import Gpu, load_gpu
from scripts.tools.gpu_check.kernels import LIBRARIES
from scripts.tools.gpu_check.measuring import SMALL
from scripts.tools.gpu_check.processes.checks import check_processes
from scripts.tools.gpu_check.processes.client import Client, ModelProcess
from scripts.tools.gpu_check.processes.figures import many_requests
from scripts.tools.gpu_check.report import CheckFailedError, Report
from scripts.tools.gpu_check.server.checks import check_with_server, find_server
from shm_backend_utils.errors import MachineError

try:
    load_gpu("neither")
except MachineError as error:  # also where other tests of this process have loaded the fake driver
    pytest.skip(f"no GPU was tested: {error}", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=LIBRARIES)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    try:
        return load_gpu(request.param)
    except (ImportError, MachineError) as error:
        pytest.skip(str(error))


@pytest.fixture
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """A report of checks, none of which may have failed in the end."""
    made = Report("tests", {}, tmp_path_factory.mktemp("gpu"), is_fake=False)
    yield made
    failed = [f"{each.name}: {each.detail}\n{each.trace}" for each in made.outcomes if each.status != "PASS"]
    assert not failed, "\n".join(failed)
    assert made.outcomes


def test_between_two_processes(gpu: Gpu, report: Report) -> None:
    check_processes(report, "two processes", gpu, functools.partial(load_gpu, gpu.kernels.name))


def test_many_requests_leave_nothing_behind(gpu: Gpu) -> None:
    load = functools.partial(load_gpu, gpu.kernels.name)
    with ModelProcess(load) as model, Client(gpu, model) as client:
        many_requests(client, SMALL)


def test_with_a_server(gpu: Gpu, report: Report) -> None:
    try:
        find_server(None)
    except CheckFailedError as reason:
        pytest.skip(str(reason))
    with check_with_server(report, {gpu.kernels.name: gpu}, None):
        pass
