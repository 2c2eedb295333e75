"""What is wrong with triton-shm-client 0.1.0, shown where that does no harm; and that it is right here."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.compat.triton_shm_client import InferShmError, TritonSHMClient
from shm_backend_utils.errors import TensorError
from shm_backend_utils.server import EmbeddedServer

from .eventually import eventually
from .two_classes import CLASSES, ORDINARY, ROWS, Call, x_of

SHM = Path("/dev/shm")
LONG_S = 60
X = x_of(4) + 1

# A program that says in which memory it works, and dies as it takes the model's numbers for addresses.
DEADLY = """
import sys
import numpy as np
from triton_shm_client import TritonSHMClient

client = TritonSHMClient(sys.argv[1])
client.register_shm_model("rows", [("X", (4,), np.float32)], [("DOUBLED", (2,), object)], 4, 2)
print(client.registered_models["rows"].shm_name, flush=True)
print(client.infer_shm("rows", {"X": np.ones((4, 4))}))
"""


def test_the_original_dies_of_an_output_of_objects(triton_server: EmbeddedServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEADLY, triton_server.grpc_url], capture_output=True, timeout=LONG_S, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    name = done.stdout.decode().split()[0]
    eventually(lambda: not (SHM / name).exists())


def test_an_input_that_is_missing_is_what_was_there_before(triton_server: EmbeddedServer) -> None:
    with CLASSES["theirs"](triton_server.grpc_url) as client:
        ORDINARY.but(pool_size=1).register(client)
        client.infer_shm("ordinary", {"X": X, "N": np.full((4, 1), 7)})
        np.testing.assert_array_equal(client.infer_shm("ordinary", {"X": X})["Y"], X * 7)


def test_here_an_input_that_is_missing_is_named(triton_server: EmbeddedServer) -> None:
    with TritonSHMClient(triton_server.grpc_url) as client:
        ORDINARY.register(client)
        with pytest.raises(InferShmError, match="model 'ordinary' needs input 'N'") as caught:
            client.infer_shm("ordinary", {"X": X})
        assert isinstance(caught.value.__cause__, TensorError)


def larger(kind: Any, server: EmbeddedServer) -> Any:
    """Return an output that is declared larger than it is, after a call that has used the memory up."""
    with kind(server.grpc_url) as client:
        ROWS.reading(("DOUBLED", (6,), np.float32)).but(pool_size=1).register(client)
        client.infer_shm("rows", {"X": X})
        return client.infer_shm("rows", {"X": X[:2]})["DOUBLED"]


def test_an_output_that_is_smaller_than_declared_is_followed_by_what_was_there_before(
    triton_server: EmbeddedServer,
) -> None:
    np.testing.assert_array_equal(larger(CLASSES["theirs"], triton_server), (X * 2).ravel()[:12].reshape(2, 6))


def test_here_its_rows_are_in_place_and_followed_by_zeros(triton_server: EmbeddedServer) -> None:
    np.testing.assert_array_equal(larger(TritonSHMClient, triton_server), np.pad(X[:2] * 2, ((0, 0), (0, 2))))


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_a_smaller_output_of_another_dtype_is_its_bytes(triton_server: EmbeddedServer, kind: Any) -> None:
    """Followed by zeros: here always, there in memory that nobody has used."""
    call = Call(ROWS.reading(("DOUBLED", (20,), np.uint8)), {"X": X[:1]})
    assert call.made_by(kind, triton_server)["DOUBLED"].tobytes() == (X[:1] * 2).tobytes() + bytes(4)


@pytest.mark.parametrize("name", ["folder/rows", "rows " * 100], ids=["slash", "long"])
def test_a_models_name_is_no_files_name(triton_server: EmbeddedServer, name: str) -> None:
    with CLASSES["theirs"](triton_server.grpc_url) as client, pytest.raises(OSError, match="Invalid argument|too long"):
        ROWS.but(model=name).register(client)
    with TritonSHMClient(triton_server.grpc_url) as client:
        ROWS.but(model=name).register(client)
        with pytest.raises(InferShmError, match="unknown model"):
            client.infer_shm(name, {"X": X})
