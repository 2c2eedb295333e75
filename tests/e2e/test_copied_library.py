"""The library in a model's folder, put there as docs/deployment.md says, on a server whose Python has none."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import shm_backend_utils
from shm_backend_utils.cli.doctor.folder_checks import findings_in_folder
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

from ..crash.servers import installation_with

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(shm_backend_utils.__file__).parent
NUMPY = sorted(Path(np.__file__).parents[1].glob("numpy*"))
ONLY_WITH_A_COPY = "\nimport os, shm_backend_utils\nassert os.path.dirname(__file__) in shm_backend_utils.__file__\n"


class BareInstallation(Installation):
    """A server whose Python has NumPy, and no other package."""

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        """Return one with an environment of that kind, whatever packages this process has.

        Stubs of newer servers heed ``PYTHONPATH``, in which pytest-xdist has the checkout.
        """
        return {**super().environment(self.folder / "python"), "PYTHONPATH": ""}


def python_with(folder: Path, *packages: Path) -> Path:
    """Make an environment of this Python with some packages alone, and return where they are."""
    venv.create(folder, symlinks=True)
    place = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in packages:
        (place / package.name).symlink_to(package)
    return place


class BareServer(NamedTuple):
    """A server, and the folder of its models."""

    models: Path
    url: str
    grpc: Any

    def add(self, name: str, more_code: str) -> Path:
        """Put the sample that multiplies into the repository, and return its version's folder."""
        folder = self.models / name
        shutil.copytree(ROOT / "model_repository" / "multiply", folder, ignore=shutil.ignore_patterns("__pycache__"))
        with (folder / "1" / "model.py").open("a") as opened:
            opened.write(more_code)
        return folder / "1"

    def doubles(self, model: str) -> bool:
        """Return whether a model that has multiplied on the direct path is right."""
        images = np.random.default_rng(7).random((2, 3, 224, 224), np.float32)
        with ShmClient(self.url, path="direct") as client:
            return np.array_equal(client.infer(model, {"INPUT0": images})["OUTPUT0"], images * 2)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    """A server without models, and without the package."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "models").mkdir()
    installation_with(["--model-control-mode=explicit"], folder / "installation")
    python_with(folder / "installation" / "python", *NUMPY)
    installation = BareInstallation(folder / "installation")
    log = folder / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # a stub looks into the server's working directory first, and here is a checkout
        server = EmbeddedServer.start(folder / "models", installation=installation, log_file=log, numpy="own")
    with server, contextlib.closing(tritonclient.grpc.InferenceServerClient(server.grpc_url)) as grpc:
        yield BareServer(folder / "models", server.grpc_url, grpc)


def install(wheel: Path, version: Path) -> None:
    """Run the page's command for a version's folder, without asking an index."""
    (command,) = re.findall(r"^pip install .*$", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
    given = {"models/resize/1": str(version), "WHEEL": str(wheel)}
    words = [given.get(word, word) for word in shlex.split(command)]
    quietly = ["--no-index", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", *words, *quietly], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_loads_and_serves_on_the_direct_path_once_its_folder_has_a_copy(bare: BareServer, wheel: Path) -> None:
    version = bare.add("copied", ONLY_WITH_A_COPY)
    with pytest.raises(InferenceServerException, match="No module named 'shm_backend_utils'"):
        bare.grpc.load_model("copied")
    install(wheel, version)
    bare.grpc.load_model("copied")
    assert bare.doubles("copied")
    assert findings_in_folder(version.parent) == []
