"""What every test gets: a check that it leaves no shared memory behind, and a real server for those that ask."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shm_backend_utils.server import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "programs"))  # for what tests share with scripts
SHM = Path("/dev/shm")

# A busy machine is no bug: no example has to be found or run within a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def shared_memory_of_this_process() -> Counter[str]:
    """Count what this process holds of /dev/shm: open descriptors, mappings, and objects that it made."""
    held: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a Path per descriptor would cost every test
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # the listing's own descriptor, or one that another thread has closed meanwhile
        if target.startswith(f"{SHM}/"):
            held[f"descriptor of {target}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if fields[-1].startswith(f"{SHM}/"):
            held[f"mapping of {fields[-1]}"] += 1
    for path in SHM.glob(f"shmbu-{os.getpid()}-*"):
        held[f"object {path}"] += 1
    return held


@pytest.fixture(autouse=True)
def _leaves_no_shared_memory() -> Iterator[None]:
    before = shared_memory_of_this_process()
    yield
    leaked = shared_memory_of_this_process() - before
    if leaked:
        gc.collect()  # what only waits for the collector is no leak
        leaked = shared_memory_of_this_process() - before
    assert not leaked, f"the test left behind: {dict(leaked)}"


@pytest.fixture(scope="session")
def triton_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with every sample model that this machine can run and every test model, one for all tests here."""
    from sample_models import copy_sample_models

    folder = tmp_path_factory.mktemp("server")
    repository = copy_sample_models(folder / "models")
    for config in (ROOT / "tests" / "models").glob("*/config.pbtxt"):
        shutil.copytree(config.parent, repository / config.parent.name, ignore=shutil.ignore_patterns("__pycache__"))
    with EmbeddedServer.start(repository, log_file=folder / "server.log") as server:
        yield server
    assert list(SHM.glob(f"{server.shm_prefix}*")) == []
