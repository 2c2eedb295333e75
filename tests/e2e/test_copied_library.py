"""The library in a model's folder, put there as docs/deployment.md says, on a server whose Python has none."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm_backend_utils.cli.doctor.folder_checks import findings_in_folder
from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation

from ..crash.servers import installation_with

ROOT = Path(__file__).resolve().parents[2]
NUMPY = sorted(Path(np.__file__).parents[1].glob("numpy*"))
ONLY_WITH_A_COPY = "\nimport os, shm_backend_utils\nassert os.path.dirname(__file__) in shm_backend_utils.__file__\n"


class BareInstallation(Installation):
    """A server whose Python has NumPy, and no other package."""

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        """Return one with an environment of that kind, whatever packages this process has.

        Stubs of newer servers heed ``PYTHONPATH``, in which pytest-xdist has the checkout.
        """
        return {**super().environment(self.folder / "python"), "PYTHONPATH": ""}


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server without the package, in a folder with a model that multiplies, and needs it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "model_repository" / "multiply", tmp_path / "models" / "copied", ignore=ignored)
    with (tmp_path / "models" / "copied" / "1" / "model.py").open("a") as opened:
        opened.write(ONLY_WITH_A_COPY)
    installation_with(["--model-control-mode=explicit"], tmp_path / "installation")
    environment = tmp_path / "installation" / "python"
    venv.create(environment, symlinks=True)
    place = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in NUMPY:
        (place / package.name).symlink_to(package)
    installation, log = BareInstallation(tmp_path / "installation"), tmp_path / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # a stub looks into the server's working directory first, and here is a checkout
        server = EmbeddedServer.start(tmp_path / "models", installation=installation, log_file=log, numpy="own")
    with server:
        yield server


def install(wheel: Path, version: Path) -> None:
    """Run the page's command for a version's folder, without asking an index."""
    (command,) = re.findall(r"^pip install .*$", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
    given = {"models/resize/1": str(version), "WHEEL": str(wheel)}
    words = [given.get(word, word) for word in shlex.split(command)]
    quietly = ["--no-index", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", *words, *quietly], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_loads_and_serves_on_the_direct_path_once_its_folder_has_a_copy(
    bare: EmbeddedServer, wheel: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "copied"
    images = np.random.default_rng(7).random((2, 3, 224, 224), np.float32)
    with ShmClient(bare.grpc_url, path="direct") as client:
        with pytest.raises(InferenceError, match="No module named 'shm_backend_utils'"):
            client.load_model("copied")
        install(wheel, folder / "1")
        client.load_model("copied")
        np.testing.assert_array_equal(client.infer("copied", {"INPUT0": images})["OUTPUT0"], images * 2)
    assert findings_in_folder(folder) == []
