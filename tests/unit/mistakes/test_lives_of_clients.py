"""Clients, calls and results that are used too late, by others, or twice; and clients whose libraries are not there."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import CallerError, ClosedError, PoolOptions
from tests.unit.fake_server import FakeServer
from tests.unit.fake_wires import async_client_of, client_of, connected

X = np.ones(3, np.float32)
DESCRIBED: Any = {"IN0": ((3,), np.float32)}


def test_a_result_that_is_released_and_arrays_that_were_kept(server: FakeServer) -> None:
    with client_of(server) as client:
        with client.infer("m", {"IN0": X}) as result:
            kept = result["OUT0"]
        with pytest.raises(ClosedError) as error:
            result["OUT0"]
        assert str(error.value) == (
            "this result is closed; take arrays from it before its with block ends, or release(): they stay valid"
        )
    assert kept.tolist() == [2, 2, 2], "an array is valid as long as it lives, also when all is closed"


OTHERS = "they belong to the process that made them; make a client in each process"


def test_a_client_or_a_call_that_is_sent_to_another_process(server: FakeServer) -> None:
    with client_of(server) as client, client.prepare("m", DESCRIBED) as call:
        for sent in (client, call):
            with pytest.raises(TypeError) as error:
                pickle.dumps(sent)
            assert str(error.value) == f"{type(sent).__name__} objects cannot be pickled: {OTHERS}"

    async def send() -> None:
        async with async_client_of(server) as client:
            with pytest.raises(TypeError, match=f"^AsyncShmClient objects cannot be pickled: {OTHERS}$"):
                pickle.dumps(client)

    asyncio.run(send())


@pytest.mark.parametrize(
    ("way", "path"), [(pickle.dumps, "direct"), (copy.copy, "triton-shm"), (copy.deepcopy, "inline")]
)
def test_a_result_that_is_sent_to_another_process(server: FakeServer, way: Any, path: Any) -> None:
    with client_of(server) as client, client.infer("m", {"IN0": X}, path=path) as result:
        with pytest.raises(TypeError) as error:
            way(result)
        assert str(error.value) == (
            "a Result cannot be pickled, nor copied so: take result.copy(), a dict of arrays of their own"
        )
        assert pickle.loads(pickle.dumps(result.copy()))["OUT0"].tolist() == [2, 2, 2]


def test_a_client_in_two_event_loops(server: FakeServer) -> None:
    async def make() -> Any:
        async with async_client_of(server) as client:
            with pytest.raises(CallerError) as error:
                await asyncio.to_thread(asyncio.run, infer(client))
            return str(error.value)

    async def infer(client: Any) -> None:
        await client.infer("m", {"IN0": X})

    assert asyncio.run(make()) == "this client belongs to another event loop; make one client in each loop"


@pytest.mark.filterwarnings("ignore:.* was not closed:ResourceWarning")
def test_a_cell_that_is_run_twice(server: FakeServer) -> None:
    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"shmbu-{os.getpid()}-*")}

    before = names()
    for _ in range(2):
        client = connected(server, pool=PoolOptions(region="system"))
        call = client.prepare("m", DESCRIBED)
        call.inputs["IN0"][...] = X
        result = call.infer()
    assert result["OUT0"].tolist() == [2, 2, 2]
    assert len(names() - before) == 1, "the first client's memory went with the client"
    client.close()
    assert names() == before


ADVICE = "run pip install 'triton-shm-backend-utils[client]'"


def last_line_without(library: str, program: str) -> str:
    """Return the last line that Python prints when a program imports what is not there."""
    hidden = f"import sys; sys.modules[{library!r}] = None\n{program}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_tritonclient() -> None:
    line = last_line_without("tritonclient", "import shm_backend_utils.client")
    assert line.startswith("ModuleNotFoundError: shm_backend_utils.client lacks a library (")
    assert "tritonclient" in line
    assert line.endswith(f"); {ADVICE}")


@pytest.mark.parametrize(("library", "url"), [("grpc", "localhost:1"), ("httptools", "http://localhost:1")])
def test_without_what_one_protocol_needs(library: str, url: str) -> None:
    line = last_line_without(library, f"from shm_backend_utils.client import ShmClient; ShmClient({url!r})")
    assert line.startswith("ModuleNotFoundError: shm_backend_utils.client lacks a library (")
    assert library in line
    assert line.endswith(f"); {ADVICE}")
