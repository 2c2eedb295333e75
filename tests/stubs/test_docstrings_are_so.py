"""What the docstrings of the stubs say of memory, types and errors is so on the real server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc as triton

from shm_backend_utils.server import EmbeddedServer
from shm_backend_utils.server.stub_numpy import is_there_another, reads_own

MODELS: Final = Path(__file__).parent / "models"
SOURCE: Final = ast.parse((MODELS / "says_so" / "1" / "model.py").read_text())
CLAIMS: Final = [
    function.name
    for node in SOURCE.body
    if isinstance(node, ast.ClassDef) and node.name == "Claims"
    for function in node.body
    if isinstance(function, ast.FunctionDef)
]

pytestmark = pytest.mark.skipif(
    not is_there_another() and not reads_own(), reason="there is no NumPy 1 for this Python, which plain models need"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server whose models have the NumPy that its stub was built for."""
    with EmbeddedServer.start(MODELS, log_file=tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator[Any]:
    client: Any = triton.InferenceServerClient(server.grpc_url)
    yield client
    client.close()


@pytest.mark.parametrize("claim", CLAIMS)
def test_it_is_so(client: Any, claim: str) -> None:
    x, words = np.arange(3, dtype=np.float32), np.array([b"a", b"bc"], object)
    inputs = [triton.InferInput("X", x.shape, "FP32"), triton.InferInput("WORDS", words.shape, "BYTES")]
    inputs[0].set_data_from_numpy(x)
    inputs[1].set_data_from_numpy(words)
    result = client.infer("says_so", inputs, parameters={"claim": claim})
    assert result.as_numpy("Y").tolist() == [1]
    assert [output.name for output in result.get_response().outputs] == ["Y"]
