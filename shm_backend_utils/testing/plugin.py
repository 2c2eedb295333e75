"""The pytest plugin: models without a server, a real server, faults, and a check for leaked shared memory.

Pytest finds it by its entry point, wherever this package is installed; see docs/testing.md. It is imported for every
run of pytest, so its fixtures import their dependencies only when they are used.

If the server that many tests share dies, at most one test fails, and the death is reported. Triton before 24.12 may
crash by itself (its issue 7368). A test that fails because of such a crash proves nothing: the plugin runs it once more
with a new server, and it fails only if it fails again. If anything else ended the server, the test fails. Either way,
all fixtures are torn down, also those of modules and the session, as they may hold clients of the dead server. The next
test makes new ones. The summary at the end of a run names every test during which a server died.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from _pytest.runner import runtestprotocol  # not public, but made for this: pytest-rerunfailures calls it too

if TYPE_CHECKING:
    from ..server import EmbeddedServer
    from .faults.at_hand import Faults
    from .harness import ModelHarness
    from .leak_probe import ShmLeakProbe

__all__ = ["Models", "SharedServer", "faults", "shm_leak_check", "triton_model", "triton_repository", "triton_server"]

_FIXTURE: Final = "triton_server"
_OUTCOME: Final[str] = "server died"  # neither passed nor failed, and the name under which pytest counts it
_CRASHED: Final = "Signal (11) received."  # tritonserver's line as it dies of its own fault
_PATIENCE_S: Final = 5.0
_POLL_S: Final = 0.05
_START_S: Final = 600.0
_LINES: Final = 30
_UNSEEN: Final = "passed, and the server was found dead after it"


@dataclass(frozen=True)
class _Death:
    is_a_crash: bool
    log: str

    @classmethod
    def of(cls, server: EmbeddedServer) -> _Death:
        _, crashed, stack = server.log_file.read_text(errors="replace").partition(_CRASHED)
        lines = f"{crashed}{stack}".splitlines()[:_LINES] if crashed else [server.log_tail(_LINES)]
        return cls(bool(crashed), "\n".join(lines))


class SharedServer:
    """Hooks of pytest, and the server that they watch."""

    def __init__(self) -> None:
        self._server: EmbeddedServer | None = None
        self._death: _Death | None = None  # of a server that was given back
        self._latest: pytest.Item | None = None

    @contextlib.contextmanager
    def holding(self, server: EmbeddedServer) -> Iterator[EmbeddedServer]:
        """Watch a server; the caller ends it after the block."""
        self._server = server
        try:
            yield server
        finally:
            self._death = _seen_dying(server)
            self._server = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test that uses the server; twice, if Triton crashed."""
        if not _uses_the_server(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self._latest is not None and (death := self._taken_death()) is not None:
            self._tell(self._latest, death, _UNSEEN)
        self._latest = item
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        death = self._death_in(reports)
        if death is not None and death.is_a_crash:
            self._tell(item, death, "failed as Triton itself crashed, and was run once more")
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            death = self._death_in(reports)
        if death is not None:
            self._tell(item, death, "failed")
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        if nextitem is None and (death := self._taken_death()) is not None:
            self._tell(item, death, _UNSEEN)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Any:
        """Give the test that starts the server more time, as pytest-timeout also counts the setup of fixtures.

        If that test timed out during the start, all others that use the server would fail with its error.
        """
        if self._server is not None or not _uses_the_server(item):
            return None
        settings = settings._replace(timeout=settings.timeout + _START_S)
        return item.config.pluginmanager.getplugin("timeout").pytest_timeout_set_timer(item, settings)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give a death a letter and a count of its own."""
        return (_OUTCOME, "D", "SERVER DIED") if report.outcome == _OUTCOME else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the tests during which a server died."""
        deaths: list[pytest.TestReport] = terminalreporter.getreports(_OUTCOME)
        if deaths:
            terminalreporter.section("tritonserver died during these tests")
        for report in deaths:
            terminalreporter.write_line(f"{report.nodeid}: {report.longrepr}")

    def _death_in(self, reports: list[pytest.TestReport]) -> _Death | None:
        """Return the server's death in a failed test, if any; after a passed test, the next test reports it."""
        if not any(report.failed for report in reports):
            return None
        if self._server is not None:
            _wait_for_the_end_of(self._server)
        return self._taken_death()

    def _taken_death(self) -> _Death | None:
        if self._server is not None and not self._server.is_running:
            self._death = _Death.of(self._server)
            self._server = None
        death, self._death = self._death, None
        return death

    def _tell(self, item: pytest.Item, death: _Death, what: str) -> None:
        """Report a death, and tear down all fixtures, so that the next test starts a server."""
        try:
            item.session._setupstate.teardown_exact(None)
        except Exception as error:  # of code that did not expect its server to be gone
            what = f"{what}; fixtures that had used the server failed to end: {error!r}"
        self._death = None  # the fixture saw it, too
        report = pytest.TestReport(
            item.nodeid, item.location, {}, cast(Any, _OUTCOME), f"{what}\n{death.log}", "teardown"
        )
        item.ihook.pytest_runtest_logreport(report=report)


def _uses_the_server(item: pytest.Item) -> bool:
    return _FIXTURE in getattr(item, "fixturenames", ())


def _seen_dying(server: EmbeddedServer) -> _Death | None:
    _wait_for_the_end_of(server)
    return None if server.is_running else _Death.of(server)


def _wait_for_the_end_of(server: EmbeddedServer) -> None:
    """Return when it has ended, or is seen to be alive: its connections break a moment before it has ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while server.is_running and not server.is_ready() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


_FOLDER = "triton_model_repository"
_SHARED_SERVER = pytest.StashKey[SharedServer]()
_PROBE = pytest.StashKey["ShmLeakProbe | None"]()  # of the last test, unless fixtures that several share came since


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the folder of models."""
    parser.addini(
        _FOLDER,
        "folder of models, relative to the ini file: for the fixtures triton_model and triton_server",
        default="model_repository",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch the server that tests share."""
    config.stash[_SHARED_SERVER] = shared = SharedServer()
    config.pluginmanager.register(shared)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Set up ``shm_leak_check`` before all other fixtures of its test, and end it after them, whatever their order."""
    if fixturedef.scope != "function":
        request.config.stash[_PROBE] = None
    elif "shm_leak_check" in request.fixturenames and fixturedef.argname != "shm_leak_check":
        with contextlib.suppress(pytest.FixtureLookupError):  # a user's own shm_leak_check may need this fixture
            request.getfixturevalue("shm_leak_check")


class Models:
    """Loads models for one test, and closes them at its end.

    Parameters
    ----------
    repository : str or pathlib.Path
        The folder of the models that you give by name.
    """

    def __init__(self, repository: str | Path) -> None:
        self._repository = Path(repository)
        self._open = contextlib.ExitStack()

    def __call__(self, model: str | Path, *others: str | Path) -> ModelHarness:
        """Load a model in this process.

        Parameters
        ----------
        model : str or pathlib.Path
            Its folder, or the name of a folder in the repository.
        *others : str or pathlib.Path
            Models that the first one calls.

        Returns
        -------
        ModelHarness
            Open as long as the test runs.
        """
        from .harness import ModelHarness  # noqa: PLC0415

        return self._open.enter_context(ModelHarness(self._folder(model), *map(self._folder, others)))

    def in_child(self, model: str | Path, *others: str | Path) -> ModelHarness:
        """Load a model in a process of its own, so that memory is really shared; otherwise like calling this."""
        from .harness import ModelHarness  # noqa: PLC0415

        return self._open.enter_context(ModelHarness.in_child(self._folder(model), *map(self._folder, others)))

    def close(self) -> None:
        """Close all models."""
        self._open.close()

    def _folder(self, model: str | Path) -> Path:
        return Path(model) if Path(model).is_dir() else self._repository / model


@pytest.fixture
def triton_model(triton_repository: str | Path) -> Iterator[Models]:
    """Load models without a server: ``triton_model("multiply").infer({"X": x})``."""
    with contextlib.closing(Models(triton_repository)) as models:
        yield models


@pytest.fixture(scope="session")
def triton_repository(pytestconfig: pytest.Config) -> Path:
    """Return the folder of models, from the ini option ``triton_model_repository``. An override may return a str."""
    return pytestconfig.rootpath / str(pytestconfig.getini(_FOLDER))


@pytest.fixture(scope="session")
def triton_server_options() -> dict[str, Any]:
    """Return further options of :meth:`.EmbeddedServer.start`. You can override it."""
    return {}


@pytest.fixture(scope="session")
def triton_server(
    pytestconfig: pytest.Config, triton_repository: str | Path, triton_server_options: dict[str, Any]
) -> Iterator[EmbeddedServer]:
    """Run a real server with all models of the repository, one for all tests of a session (and of a worker).

    If it dies, the next test that uses it gets another.
    """
    from ..server import EmbeddedServer  # noqa: PLC0415

    with (
        EmbeddedServer.start(Path(triton_repository), **triton_server_options) as server,
        pytestconfig.stash[_SHARED_SERVER].holding(server),
    ):
        yield server
    left = list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
    assert left == [], f"the server has left shared memory behind: {left}"


@pytest.fixture
def shm_leak_check(pytestconfig: pytest.Config) -> Iterator[ShmLeakProbe]:
    """Fail a test after which this process has more descriptors, mappings or objects in ``/dev/shm`` than before."""
    from .leak_probe import ShmLeakProbe  # noqa: PLC0415

    probe = pytestconfig.stash.get(_PROBE, None) or ShmLeakProbe(pool_prefix=None)
    pytestconfig.stash[_PROBE] = None
    with contextlib.ExitStack() as after:
        after.push(probe)  # not entered: each look takes the kernel a millisecond and a half
        yield probe
    pytestconfig.stash[_PROBE] = probe


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Inject faults: see :class:`.Faults`. They are undone at the end of the test where possible."""
    from .faults.at_hand import Faults  # noqa: PLC0415

    with Faults() as made:
        yield made
