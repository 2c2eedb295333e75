"""What a client may say and hand over, at a real server: all of it is refused in time, and nothing is left of it.

The model's process lives on, has nothing more mapped or open than before, and serves an honest client as before.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from scripts.tools.processes import mappings, open_files
from shm_backend_utils.client import PoolOptions, ShmClient
from shm_backend_utils.memory.descriptors import Descriptor
from shm_backend_utils.protocol.handover import SealedKey
from shm_backend_utils.protocol.layout import HEADER_LENGTH, PAGE_SIZE, Header, data_offset, write_header
from tests.crash.processes import stub_of
from tests.unit.fetching.conftest import Script, ScriptedServer, give, say_nothing

from .eventually import eventually
from .loading_server import LoadingServer

MODEL = "fetching"
BOUND_S = 0.5
CONFIG = (Path(__file__).resolve().parents[1] / "models" / "direct_only" / "config.pbtxt").read_text()
BOUND = f'parameters {{ key: "SHM_HANDOVER_S" value: {{ string_value: "{BOUND_S}" }} }}\n'
X = np.arange(64, dtype=np.float32)
A_BUSY_MACHINE_S = 10.0
NAME: Final = "by-hand"
TOKEN: Final = bytes(range(16))
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
BYTE_SIZE: Final = data_offset(1, PAGE_SIZE) + 4 * PAGE_SIZE


def region(*, claimed: int = BYTE_SIZE, size: int = BYTE_SIZE, space: int = BYTE_SIZE) -> Descriptor:
    made = Descriptor(os.memfd_create, NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    header = bytearray(HEADER_LENGTH)
    write_header(memoryview(header), Header(1, claimed, TOKEN))
    os.fchmod(made.fileno(), 0o600)
    os.ftruncate(made.fileno(), size)
    os.posix_fallocate(made.fileno(), 0, space)
    os.pwrite(made.fileno(), header, 0)
    fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, SEALS)
    return made


def address(model: str, key: SealedKey) -> str:
    return f"2/{model}/{key}/{TOKEN.hex()}/0"


class Fetching:
    """A model, raw requests to it, and an honest client of it."""

    def __init__(self, server: LoadingServer) -> None:
        self.server = server.server
        self.stub = stub_of(self.server, MODEL)
        self._grpc: Any = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
        self._http: Any = tritonclient.http.InferenceServerClient(server.server.http_url)
        self._client = ShmClient(server.server.grpc_url, timeout_s=30, pool=PoolOptions(region="sealed"))
        self._call = self._client.prepare(MODEL, {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes})

    def infer_honestly(self) -> None:
        self._call.inputs["X"][:] = X
        with self._call.infer() as result:
            np.testing.assert_array_equal(result["Y"], X)

    def refusal(self, slot: str, protocol: str = "grpc") -> str:
        """Return what the model says of a request whose slot is this."""
        client = {"grpc": self._grpc, "http": self._http}[protocol]
        with pytest.raises(InferenceServerException) as refused:
            client.infer(MODEL, [], parameters={"shm_slot": slot, "shm_generation": 5})
        return refused.value.message() or ""

    def close(self) -> None:
        self._call.close()
        self._client.close()
        self._grpc.close()
        self._http.close()

    def mapped(self, name: str = "shmbu") -> list[str]:
        """Return the inodes of the memfds of this name that are mapped in the model, one for each mapping."""
        assert self.stub is not None
        lines = [line.split(maxsplit=5) for line in mappings(self.stub)]
        return [fields[4] for fields in lines if fields[-1].startswith(f"/memfd:{name} ")]

    def has(self) -> tuple[list[str], int]:
        """Return what is mapped in the model, and how much is open there."""
        assert self.stub is not None
        return self.mapped(), len(open_files(self.stub))

    def is_at_rest(self) -> bool:
        before = self.has()
        time.sleep(0.2)
        return self.has() == before


@pytest.fixture(scope="module")
def fetching(loading_server: LoadingServer) -> Iterator[Fetching]:
    loading_server.load(MODEL, "direct_only", CONFIG + BOUND)
    fetching = Fetching(loading_server)
    fetching.infer_honestly()
    eventually(lambda: len(fetching.mapped()) == 1 and fetching.is_at_rest())  # by which path, was tried
    yield fetching
    fetching.close()
    loading_server.grpc.unload_model(MODEL)


@pytest.fixture(autouse=True)
def _leaves_the_model_as_it_was(fetching: Fetching) -> Iterator[None]:
    before = fetching.has()
    yield
    fetching.infer_honestly()
    eventually(lambda: fetching.has() == before)  # a thread of its own closes what was handed over
    assert not fetching.mapped(NAME)
    assert stub_of(fetching.server, MODEL) == fetching.stub


def pipe() -> Descriptor:
    reads, writes = os.pipe()
    os.close(writes)
    try:
        return Descriptor(os.dup, reads)
    finally:
        os.close(reads)


HAND_OVERS: Final[dict[str, tuple[Callable[[], Script], str]]] = {
    "no descriptor": (give, "its client's answer contradicts the descriptors that came with it"),
    "two descriptors": (lambda: give(region(), region()), "has handed over more than one descriptor"),
    "a pipe": (lambda: give(pipe()), "handed over no memfd; expected a sealed one"),
    "half its memory": (lambda: give(region(space=BYTE_SIZE // 2)), "bytes, and holes"),
    "no header": (lambda: give(region(size=PAGE_SIZE, space=PAGE_SIZE, claimed=1)), "has no header of a managed"),
    "silence": (lambda: say_nothing, "shm:refused: shm_slot"),  # the last one, as it uses up this user's time
}


@pytest.mark.parametrize("hand_over", HAND_OVERS)
def test_what_is_no_region_is_refused_in_time(fetching: Fetching, hand_over: str, protocol: str) -> None:
    script, complaint = HAND_OVERS[hand_over]
    with ScriptedServer(script()) as server:
        begin = time.monotonic()
        told = fetching.refusal(address(MODEL, server.key), protocol)
        assert time.monotonic() - begin < BOUND_S + A_BUSY_MACHINE_S
    assert complaint in told
    assert str(server.key) not in told
