"""EXECUTION_ENV_PATH, for real: environments that docs/deploy/execution_env/pack has packed serve the direct path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import EmbeddedServer, Installation, install
from shm_backend_utils.server.install import has_numpy_1
from tests.unit.harness.folders import folder_of

# The first test waits for pip, and for a server that unpacks archives.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PACK = ROOT / "docs" / "deploy" / "execution_env" / "pack"
FURTHER = "sortedcontainers"
"""A package that the server's own Python has not, nor the library needs."""

CONFIG = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "SHM_PATHS" value: { string_value: "direct" } }
instance_group [ { kind: KIND_CPU } ]
"""
MODEL = """
import numpy as np
from shm_backend_utils.model import ShmSession
from sortedcontainers import SortedList


class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call):
        x = call.input("INPUT0")
        call.output("OUTPUT0", x.shape, x.dtype).numpy()[:] = SortedList(x.numpy())

    def finalize(self):
        self.session.close()
"""


@dataclass(frozen=True)
class BareServer(Installation):
    """A server whose stubs run a Python that has nothing but its standard library, as far as the server says."""

    python_environment: Path = Path()

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        return super().environment(python_environment or self.python_environment)


@pytest.fixture(scope="module")
def archive(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command of docs/deployment.md makes, in a folder with the wheel."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copy(wheel, folder)
    (folder / "docs").symlink_to(ROOT / "docs")
    page = (ROOT / "docs" / "deployment.md").read_text()
    (command,) = re.findall(r"^docs/deploy/execution_env/pack .*$", page, re.MULTILINE)
    assert command.endswith(f" {FURTHER}")
    if not has_numpy_1():  # no NumPy 1 for this Python
        command = command.replace("numpy<2", "numpy")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "environment.tar.gz"


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory) -> BareServer:
    environment = tmp_path_factory.mktemp("bare")
    venv.create(environment, symlinks=True)
    return BareServer(install().folder, python_environment=environment)


def add_model(repository: Path, name: str, environment: str | None) -> Path:
    """Put a model that needs the packed packages into a repository, and return its folder."""
    named = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }}\n'
    return folder_of(repository, MODEL, CONFIG + (named if environment is not None else ""), name)


def started(installation: Installation, repository: Path, log_file: Path) -> EmbeddedServer:
    return EmbeddedServer.start(repository, installation=installation, log_file=log_file, numpy="own")


@pytest.fixture(scope="module")
def server(
    archive: Path, bare_server: BareServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("server")
    models = folder / "models"
    shutil.copy(archive, add_model(models, "beside", "$$TRITON_MODEL_DIRECTORY/environment.tar.gz"))
    add_model(models, "common", str(archive))
    add_model(models, "also_common", str(archive))
    unpacked = add_model(models, "unpacked", "$$TRITON_MODEL_DIRECTORY/environment") / "environment"
    unpacked.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", unpacked], check=True)
    with started(bare_server, models, folder / "server.log") as server:
        yield server


@pytest.mark.parametrize("model", ["beside", "common", "also_common", "unpacked"])
def test_a_model_is_served_from_its_packed_environment(server: EmbeddedServer, model: str) -> None:
    with ShmClient(server.grpc_url, path="direct") as client:
        result = client.infer(model, {"INPUT0": np.array([3, 1, 2], np.float32)})
        assert result["OUTPUT0"].tolist() == [1, 2, 3]


def test_without_it_the_same_server_has_none_of_the_packages(bare_server: BareServer, tmp_path: Path) -> None:
    add_model(tmp_path / "models", "forgotten", None)
    with pytest.raises(MachineError, match="No module named"):
        started(bare_server, tmp_path / "models", tmp_path / "server.log")


@pytest.mark.parametrize(
    ("words", "python", "said"),
    [
        ("", sys.executable, "usage: pack ARCHIVE"),
        ("environment.tar.gz", sys.executable, "usage: pack ARCHIVE"),
        ("environment.zip numpy", sys.executable, "expected a name that ends with .tar.gz"),
        ("nowhere/environment.tar.gz numpy", sys.executable, "'nowhere' is no folder that may be written to"),
        ("environment.tar.gz numpy", "/bin/false", "has no pip; set PYTHON"),
        ("environment.tar.gz ./no_such_file.whl", sys.executable, "no_such_file.whl"),
    ],
)
def test_what_cannot_be_packed_is_told_and_leaves_nothing(words: str, python: str, said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHON": python}
    command = [str(PACK), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
