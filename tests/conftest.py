"""What every test gets: a check that it leaves no shared memory behind, and a real server for those that ask."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
from hypothesis import HealthCheck, settings

from shm_backend_utils.cli.common.server import copy_models, copy_sample_models, models_in
from shm_backend_utils.client.options import PathName
from shm_backend_utils.client.transports.grpc.transport import GrpcAddress
from shm_backend_utils.errors import MachineError
from shm_backend_utils.memory.pool.options import RegionName
from shm_backend_utils.server import EmbeddedServer, Installation
from shm_backend_utils.server.install import FOLDER_VARIABLE, default_folder
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from shm_backend_utils.testing.leak_probe import ShmLeakProbe
from tests.crash.gate import Gate
from tests.crash.servers import ONCE, installation_with
from tests.e2e.loading_server import models_named_by, side_by_side
from tests.releases import refusals
from tests.selection import left_out
from tests.wheels import build_wheel

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 5.0
SLOW = (
    *(f"tests/{folder}/" for folder in ("crash", "e2e", "server", "scripts", "conformance", "deploy")),
    "tests/unit/test_interrupted_calls",
)
WITH_PYTORCH = (
    "tests/e2e/test_contract.py",
    "tests/harness/test_values",
    "tests/unit/gpu/arrays",
    "tests/unit/test_torch",
)
"""Last of theirs: with PyTorch's memory and loggers in the process, each test takes milliseconds more."""
LEAVES_GPU_MEMORY = "tests/scripts/test_gpu_check.py"
"""Last of all: it breaks what frees memory, and tests of GPUs count all that there is."""

# A busy machine is no bug: no example has to be found or run within a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of what can be done any number of times."""
    group = parser.getgroup("amounts", "what tests do any number of times")
    group.addoption(
        "--all", action="store_true", help="what is long, too, and each flavour of client: tests/selection.py"
    )
    for option, default, what in (
        ("--calls", 4_000, "calls in tests/e2e/test_threads.py"),
        ("--tables", 500, "broken tables for a server; a hundred times as many for the decoder; twice with --all"),
        ("--lies", 500, "lies by each path in tests/property/test_lies.py"),
        ("--interrupts", 100, "interrupts in tests/e2e/test_signals.py"),
        ("--examples", 100, "runs of tests/property/slot_machine; twice with --all"),
    ):
        group.addoption(option, type=int, default=default, help=f"{what}; default: %(default)s")
    group.addoption("--grpcio", action="store_true", help="have grpcio carry all calls over gRPC")


class Herald:
    """Names what fails as it fails, so that nobody has to wait for the end of a long run."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)  # after the letter
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write(f"\nFAILED {report.nodeid} ({report.when})\n", red=True)


class FramesForgotten(logging.Filter):
    """Has records tell their errors by text alone: pytest keeps records, and an error's frames keep a test's memory.

    On a busy machine, gRPC gives an event of a loop that was closed to the next test's loop, which logs that.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return True


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare markers; have failures told at once, where there is somebody to tell them: workers have not."""
    logging.getLogger("asyncio").addFilter(FramesForgotten())
    for marker in (
        "needs_triton(version, why): skipped where the suite's server is of an older Triton",
        "until_triton(version, why): skipped where the suite's server is of that Triton, or a newer one",
        "has_models_without_sessions: skipped where the stub reads no NumPy that this Python has",
        "every_flavour: on each of the four clients, not on one of them",
        "long: with --all alone",
    ):
        config.addinivalue_line("markers", marker)
    if config.getoption("--grpcio"):
        GrpcAddress.needs_grpcio = lambda self: "the tests"  # type: ignore[method-assign]
    if os.environ.get(FOLDER_VARIABLE):
        try:
            Installation(default_folder()).check()
        except MachineError as error:
            raise pytest.UsageError(str(error)) from None
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Herald(terminal))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each worker begin with other folders: it finds compiled later what others have begun with."""
    worker: dict[str, Any] = getattr(session.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    folders = session.config.args
    first = len(folders) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    session.config.args = folders[first:] + folders[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for --all, put what is long first, PyTorch last, and skip what its server cannot do."""
    if not config.getoption("--all") and (out := left_out(items)):
        config.hook.pytest_deselected(items=out)
        dropped = set(out)
        items[:] = [item for item in items if item not in dropped]
    items.sort(key=_turn)
    server = Installation(default_folder())
    if server.is_complete:
        for item in (each for each in items if not each.nodeid.startswith("tests/unit/")):  # has no server
            for why in refusals(item, server):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Have files distributed with the shared server in mind."""
    from tests.scheduling import TwoServers

    return TwoServers(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def _nobody_collects_what_was_there_before() -> None:
    """Take what modules and earlier tests have made for no garbage; to look at all of it took most of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_no_shared_memory(shm_leak_check: ShmLeakProbe) -> None:
    """Ask it of every test."""


@pytest.fixture(autouse=True)
def _leaves_nothing_on_fake_gpus() -> Iterator[None]:
    before = _left_on_fake_gpus()
    yield
    if _left_on_fake_gpus() == before:
        return
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while _left_on_fake_gpus() != before and time.monotonic() < deadline:
        time.sleep(0.001)  # what is freed on a stream is free when the stream comes to it
    assert _left_on_fake_gpus() == before


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Have threads give way to each other at nearly every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["direct", "triton-shm", "inline"])
def path(request: pytest.FixtureRequest) -> PathName:
    path: PathName = request.param
    return path


@pytest.fixture
def region() -> RegionName:
    """Return what memory clients take."""
    return "auto"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def triton_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every sample model that this machine can run, and every test model."""
    repository = copy_sample_models(tmp_path_factory.mktemp("models"))
    return copy_models(models_in(ROOT / "tests" / "models"), repository)


@pytest.fixture(scope="session")
def triton_server_options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Have models with the NumPy that the tests have, be it one that the server's stub was not built for.

    Those of servers with the other one are tests/server/test_stub_numpy.py's, and all that say nothing of it.
    """
    folder = tmp_path_factory.mktemp("server")
    installation = installation_with([ONCE, "--model-control-mode=explicit"], folder / "installation")
    return {"log_file": folder / "server.log", "installation": installation, "numpy": "own", "timeout_s": 500}


@pytest.fixture(scope="module")
def triton_server(
    triton_server: EmbeddedServer, triton_repository: Path, request: pytest.FixtureRequest
) -> EmbeddedServer:
    """Have the server load what a file's tests name: a model takes half a second of a core, and most have one file."""
    names = models_named_by(request.module, triton_repository)
    with tritonclient.grpc.InferenceServerClient(triton_server.grpc_url) as client:
        index: Any = client.get_model_repository_index()
        side_by_side(client.load_model, names - {each.name for each in index.models if each.state == "READY"})
    return triton_server


def _turn(item: pytest.Item) -> tuple[bool, bool, bool, str]:
    file = item.nodeid.partition("::")[0]
    return file == LEAVES_GPU_MEMORY, not file.startswith(SLOW), file.startswith(WITH_PYTORCH), file


def _left_on_fake_gpus() -> tuple[int, ...]:
    driver = FakeDriver.loaded()
    return (0,) * 6 if driver is None else (driver.depth(), *driver.live())
