"""The NumPy of a server's models: by default one with which every model works, also where the tests have another."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from shm_backend_utils.errors import CallerError, MachineError
from shm_backend_utils.server import EmbeddedServer, install, launch
from shm_backend_utils.server.install import install_numpy, make_environment, needs_numpy_1
from tests.releases import has_models_without_sessions
from tests.server.conftest import make_wheel
from tests.unit.harness.folders import folder_of

WORDS = Path(__file__).parents[1] / "models" / "words"
CONFIG = """
backend: "python"
input [
  { name: "X" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "WORDS" data_type: TYPE_STRING dims: [ -1 ] }
]
output [
  { name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "LOUD" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "IMPORTS" data_type: TYPE_STRING dims: [ -1 ] }
]
instance_group [ { kind: KIND_CPU } ]
"""
MODEL = """
import importlib.util

import numpy as np
import triton_python_backend_utils as pb_utils

FOUND = [name for name in ("cv2", "ml_dtypes", "torch") if importlib.util.find_spec(name)]
for name in FOUND:
    importlib.import_module(name)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
        found = [np.__version__, *FOUND]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("DOUBLED", x * 2),
                pb_utils.Tensor("LOUD", np.array([word.upper() for word in words], object)),
                pb_utils.Tensor("IMPORTS", np.array([word.encode() for word in found], object)),
            ]
        )
"""


@pytest.fixture(scope="module")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that was told nothing of NumPy, with a model of pb_utils alone and one with a ShmSession."""
    folder = tmp_path_factory.mktemp("server")
    folder_of(folder / "models", MODEL, CONFIG, "stock")
    shutil.copytree(WORDS, folder / "models" / "words", ignore=shutil.ignore_patterns("__pycache__"))
    with EmbeddedServer.start(folder / "models", log_file=folder / "server.log") as server:
        yield server


@has_models_without_sessions
def test_a_model_of_pb_utils_alone_reads_and_gives_numbers_and_strings(default_server: EmbeddedServer) -> None:
    client: Any = triton.InferenceServerClient(default_server.grpc_url)
    x, words = np.arange(4, dtype=np.float32), np.array([b"a", "ü".encode(), b""], object)
    inputs = [triton.InferInput("X", x.shape, "FP32"), triton.InferInput("WORDS", words.shape, "BYTES")]
    inputs[0].set_data_from_numpy(x)
    inputs[1].set_data_from_numpy(words)
    result = client.infer("stock", inputs)
    client.close()
    assert result.as_numpy("DOUBLED").tolist() == [0, 2, 4, 6]
    assert result.as_numpy("LOUD").tolist() == [b"A", "ü".encode(), b""]  # bytes know capitals of ASCII alone
    version = "1." if needs_numpy_1(install()) else np.__version__
    assert result.as_numpy("IMPORTS")[0].decode().startswith(version)


def test_an_unknown_word_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="numpy is '2'; expected 'server' or 'own'"):
        EmbeddedServer.start(tmp_path, numpy="2")  # type: ignore[arg-type]


def test_without_another_numpy_ones_own_does(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launch, "reads_own_numpy", lambda installation: False)
    monkeypatch.setattr(launch, "has_numpy_1", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert launch._python_environment(install()) is None
    assert "models without a ShmSession read arrays" in caplog.text


def test_an_environment_has_the_other_numpy_and_all_else_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "other" / "numpy").mkdir(parents=True)
    (tmp_path / "other" / "numpy" / "__init__.py").write_text("__version__ = 'another'")
    make_environment(tmp_path / "environment", tmp_path / "other")
    environment = install().environment(tmp_path / "environment")
    program = "import numpy, sys, pytest, shm_backend_utils; print(numpy.__version__, sys.prefix, pytest.__file__)"
    command = ["python3", "-I", "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["another", str(tmp_path / "environment"), pytest.__file__]


def test_numpy_is_installed_once_and_nothing_is_left_beside_it(wheels: Path, tmp_path: Path) -> None:
    wheel = make_wheel(wheels, "numpy", "1.26.4", "numpy/LICENSE.txt")
    folder = install_numpy(tmp_path / "server" / "numpy")
    assert {path.name for path in folder.iterdir()} == {"numpy", "numpy-1.26.4.dist-info"}
    assert list(folder.parent.iterdir()) == [folder]
    wheel.unlink()
    assert install_numpy(folder) == folder


@pytest.mark.usefixtures("wheels")
def test_a_numpy_that_cannot_be_fetched_is_an_error_that_tells_how_to_do_without(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match='numpy==1.26.4, .*; numpy="own" needs none\\)'):
        install_numpy(tmp_path / "numpy")
