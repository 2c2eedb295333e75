"""The model half in models' folders, on a server whose Python has no such package."""

from __future__ import annotations

import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import shm_backend_utils
from shm_backend_utils.cli import main
from shm_backend_utils.client import ShmClient
from shm_backend_utils.server import EmbeddedServer, Installation
from tests.releases import gives_up_loading

from ..crash.server_options import installation_with

SAMPLES = Path(__file__).resolve().parents[2] / "model_repository"
NAME = "shm_backend_utils"
NUMPY = sorted(Path(np.__file__).parents[1].glob("numpy*"))
PACKAGE = Path(shm_backend_utils.__file__).parent
VERSION_CODE = """
import os

import numpy as np
import shm_backend_utils
from shm_backend_utils.model import ShmSession

FILE = os.stat(shm_backend_utils.__file__)

class TritonPythonModel:
    def initialize(self, args):
        self.session = ShmSession.from_args(args)

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call):
        call.put("Y", np.array([VERSION, FILE.st_dev, FILE.st_ino], np.int64))

    def finalize(self):
        self.session.close()
"""
VERSION_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "Y" data_type: TYPE_INT64 dims: [ -1 ] } ]
version_policy { all { } }
parameters { key: "SHM_PATHS" value: { string_value: "direct,triton-shm,inline" } }
instance_group [ { kind: KIND_CPU } ]
"""


class BareInstallation(Installation):
    """A server whose Python has NumPy, and no other package."""

    def environment(self, python_environment: Path | None = None) -> dict[str, str]:
        """Return one with an environment of that kind, whatever packages this process has."""
        return super().environment(self.folder / "python")


def python_with(folder: Path, *packages: Path) -> Path:
    """Make an environment of this Python with some packages alone, and return where they are."""
    venv.create(folder, symlinks=True)
    place = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in packages:
        (place / package.name).symlink_to(package)
    return place


def bare_installation(folder: Path) -> Installation:
    installation_with(["--model-control-mode=explicit"], folder)
    python_with(folder / "python", *NUMPY)
    return BareInstallation(folder)


class BareServer:
    """The server, and the folders of its models."""

    def __init__(self, models: Path, server: EmbeddedServer) -> None:
        self.models = models
        self.server = server
        self.grpc: Any = tritonclient.grpc.InferenceServerClient(server.grpc_url)

    def copy(self, sample: str) -> Path:
        """Put a sample into the repository."""
        folder = self.models / sample
        shutil.copytree(SAMPLES / sample, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareServer]:
    """A server without models, and without the package."""
    folder = tmp_path_factory.mktemp("bare")
    models = folder / "models"
    models.mkdir()
    installation = bare_installation(folder / "installation")
    log = folder / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # a stub looks into the server's working directory first, and here is a checkout
        server = EmbeddedServer.start(models, installation=installation, log_file=log, numpy="own")
    with server:
        bare = BareServer(models, server)
        yield bare
        bare.grpc.close()


def test_a_model_loads_and_serves_on_the_direct_path_once_it_has_a_copy(bare: BareServer) -> None:
    model = bare.copy("multiply")
    with pytest.raises(InferenceServerException, match="No module named 'shm_backend_utils'"):
        bare.grpc.load_model("multiply")
    assert main(["vendor", str(model)]) == 0
    bare.grpc.load_model("multiply")
    images = np.random.default_rng(7).random((2, 3, 224, 224), np.float32)
    with ShmClient(bare.server.grpc_url, path="direct") as client:
        np.testing.assert_array_equal(client.infer("multiply", {"INPUT0": images})["OUTPUT0"], images * 2)
    assert main(["vendor", "--check", str(model)]) == 0  # the stub has compiled it, and nothing else


@gives_up_loading
def test_models_have_a_copy_each_and_what_else_they_need_is_not_in_it(bare: BareServer) -> None:
    for sample in ("image_resize_normalize", "identity"):
        assert main(["vendor", str(bare.copy(sample))]) == 0
    bare.grpc.load_model("identity")
    with pytest.raises(InferenceServerException, match="No module named 'cv2'"):
        bare.grpc.load_model("image_resize_normalize")
    with ShmClient(bare.server.grpc_url, path="direct") as client:
        data = np.arange(1000, dtype=np.float32)
        np.testing.assert_array_equal(client.infer("identity", {"INPUT0": data})["OUTPUT0"], data)


def test_one_copy_is_for_all_versions_and_a_load_takes_a_new_one(bare: BareServer) -> None:
    model = bare.models / "versions"
    for version in (1, 3):
        (model / str(version)).mkdir(parents=True)
        (model / str(version) / "model.py").write_text(VERSION_CODE.replace("VERSION", str(version)))
    (model / "config.pbtxt").write_text(VERSION_CONFIG)
    file = model / NAME / "__init__.py"
    inodes = set()
    for _ in range(2):
        assert main(["vendor", str(model)]) == 0
        inodes.add(file.stat().st_ino)
        bare.grpc.load_model("versions")
        with ShmClient(bare.server.grpc_url, path="direct") as client:
            for version in (1, 3):
                result = client.infer("versions", {}, outputs={"Y": 24}, model_version=str(version))
                assert result["Y"].tolist() == [version, file.stat().st_dev, file.stat().st_ino]
    assert len(inodes) == 2


@pytest.mark.parametrize("is_installed", [False, True], ids=["NumPy alone", "the package, too"])
def test_a_model_with_an_environment_of_its_own_has_the_copy_where_that_has_none(
    bare: BareServer, is_installed: bool, tmp_path: Path
) -> None:
    installed = python_with(tmp_path / "environment", *NUMPY, *([PACKAGE] if is_installed else []))
    name = f"environment_{is_installed}"
    model = bare.models / name
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(VERSION_CODE.replace("VERSION", "1"))
    environment = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{tmp_path / "environment"}" }} }}'
    (model / "config.pbtxt").write_text(VERSION_CONFIG + environment)
    assert main(["vendor", str(model)]) == 0
    bare.grpc.load_model(name)
    file = ((installed if is_installed else model) / NAME / "__init__.py").stat()
    with ShmClient(bare.server.grpc_url, path="direct") as client:
        assert client.infer(name, {}, outputs={"Y": 24})["Y"].tolist() == [1, file.st_dev, file.st_ino]


def test_what_is_beside_a_copy_is_no_version(bare: BareServer) -> None:
    index = {each.name: each.state for each in bare.grpc.get_model_repository_index().models}
    assert NAME not in index
