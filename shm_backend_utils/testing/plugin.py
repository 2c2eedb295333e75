"""The pytest plugin: models without a server, a real server, faults, and whether shared memory is left behind.

Pytest finds it by its entry point, wherever this package is installed; see docs/testing.md. It is imported for every
run of pytest, so its fixtures import their needs when they are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .shared_server import SharedServer

if TYPE_CHECKING:
    from ..server import EmbeddedServer
    from .faults.at_hand import Faults
    from .harness import ModelHarness
    from .leak_probe import ShmLeakProbe

__all__ = ["Models", "faults", "shm_leak_check", "triton_model", "triton_repository", "triton_server"]

_FOLDER = "triton_model_repository"
_SHARED_SERVER = pytest.StashKey[SharedServer]()
_PROBE = pytest.StashKey["ShmLeakProbe | None"]()  # of the last test, unless fixtures that several share came since


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where the models are."""
    parser.addini(
        _FOLDER,
        "folder of models, from the one with this file: for the fixtures triton_model and triton_server",
        default="model_repository",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look after the server that tests share."""
    config.stash[_SHARED_SERVER] = shared = SharedServer()
    config.pluginmanager.register(shared)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Have ``shm_leak_check`` look before, and after, all other fixtures of its test, in whatever order they come."""
    if fixturedef.scope != "function":
        request.config.stash[_PROBE] = None
    elif "shm_leak_check" in request.fixturenames and fixturedef.argname != "shm_leak_check":
        with contextlib.suppress(pytest.FixtureLookupError):  # one of the user's own may need this fixture itself
            request.getfixturevalue("shm_leak_check")


class Models:
    """Loads models for one test; they are let go of when it is over.

    Parameters
    ----------
    repository : pathlib.Path
        Where models lie that are given by their names.
    """

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._open = contextlib.ExitStack()

    def __call__(self, model: str | Path, *others: str | Path) -> ModelHarness:
        """Load a model in this process.

        Parameters
        ----------
        model : str or pathlib.Path
            Its folder, or its name: that of a folder in the repository.
        *others : str or pathlib.Path
            Models that it calls.

        Returns
        -------
        ModelHarness
            Open as long as the test runs.
        """
        from .harness import ModelHarness  # noqa: PLC0415

        return self._open.enter_context(ModelHarness(self._folder(model), *map(self._folder, others)))

    def in_child(self, model: str | Path, *others: str | Path) -> ModelHarness:
        """Load a model in a process of its own, so that memory is really shared; otherwise as a call."""
        from .harness import ModelHarness  # noqa: PLC0415

        return self._open.enter_context(ModelHarness.in_child(self._folder(model), *map(self._folder, others)))

    def close(self) -> None:
        """Let go of all models."""
        self._open.close()

    def _folder(self, model: str | Path) -> Path:
        return Path(model) if Path(model).is_dir() else self._repository / model


@pytest.fixture
def triton_model(triton_repository: Path) -> Iterator[Models]:
    """Load models without a server: ``triton_model("multiply").infer({"X": x})``."""
    with contextlib.closing(Models(triton_repository)) as models:
        yield models


@pytest.fixture(scope="session")
def triton_repository(pytestconfig: pytest.Config) -> Path:
    """Return the folder of models, from the ini option ``triton_model_repository``. To be overridden at will."""
    return pytestconfig.rootpath / str(pytestconfig.getini(_FOLDER))


@pytest.fixture(scope="session")
def triton_server_options() -> dict[str, Any]:
    """Return further options of :meth:`.EmbeddedServer.start`. To be overridden at will."""
    return {}


@pytest.fixture(scope="session")
def triton_server(
    pytestconfig: pytest.Config, triton_repository: Path, triton_server_options: dict[str, Any]
) -> Iterator[EmbeddedServer]:
    """Run a real server with all models of the repository, one for all tests of a session (and of a worker).

    Should it die, the next test that wants it gets another: see :mod:`.shared_server`.
    """
    from ..server import EmbeddedServer  # noqa: PLC0415

    with (
        EmbeddedServer.start(triton_repository, **triton_server_options) as server,
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
        after.push(probe)  # not entered: to look takes the kernel a millisecond and a half each time
        yield probe
    pytestconfig.stash[_PROBE] = probe


@pytest.fixture
def faults() -> Iterator[Faults]:
    """Make things go wrong: see :class:`.Faults`. The end of the test undoes them where possible."""
    from .faults.at_hand import Faults  # noqa: PLC0415

    with Faults() as made:
        yield made
