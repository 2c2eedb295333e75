"""docs/protocol.md on a real server: the messages as they stand there, and a client in C, written from it alone."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.memory import locks
from shm_backend_utils.memory.segment import MappedSegment, SystemSegment
from shm_backend_utils.protocol import layout, results, table
from shm_backend_utils.protocol.layout import Header, SlotRecord
from shm_backend_utils.protocol.parameters import parse_address
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.server import EmbeddedServer
from tests.releases import tells_404

DOCUMENT: Final = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
REQUEST, ANSWER, REFUSAL, BATCH_REQUEST = re.findall(r"```http\n(.*?)```", DOCUMENT, re.DOTALL)
TABLE, RESULTS = [bytes.fromhex(text) for text in re.findall(r"```hex\n(.*?)```", DOCUMENT, re.DOTALL)]
GENERATION: Final = 7
DATA: Final = layout.data_offset(1, layout.PAGE_SIZE)


class Region:
    """The region that the examples name, with one slot."""

    def __init__(self, data_byte_size: int) -> None:
        body = json.loads(body_of(REQUEST))
        address = parse_address(body["parameters"]["shm_slot"])
        byte_size = DATA + data_byte_size
        header = Header(1, byte_size, bytes.fromhex(address.token))

        def prepare(segment: MappedSegment) -> None:
            locks.hold_owner_lease(segment.fileno())
            layout.write_header(segment.buffer(), header)

        self.segment = SystemSegment.create(address.key, byte_size, prepare=prepare)
        self.record = SlotRecord(self.segment.buffer(), 0, layout.PAGE_SIZE)

    def array(self, offset: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = np.ndarray(shape, np.float32, self.segment.buffer(), offset)
        return array

    def close(self) -> None:
        self.segment.unlink()
        self.segment.close()
        del self.segment, self.record  # their views hold the mapping


@pytest.fixture
def region() -> Iterator[Region]:
    with contextlib.closing(Region(4096)) as region:
        yield region


def body_of(message: str) -> str:
    """Return the body of a message of the page, where it is broken into lines."""
    return message.partition("\n\n")[2].replace("\n", "")


def sent(server: EmbeddedServer, message: str) -> tuple[list[str], str]:
    """Send a request as the page has it, and return head and body of the answer."""
    head, _, _ = message.partition("\n\n")
    head = re.sub("Host: .*", f"Host: {server.http_url}", head)
    host, _, port = server.http_url.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall("\r\n".join([*head.splitlines(), "Connection: close", "", body_of(message)]).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return head.splitlines(), body


def check(answer: tuple[list[str], str], expected: str) -> None:
    head, _, _ = expected.partition("\n\n")
    assert set(head.splitlines()) <= set(answer[0])
    assert answer[1] == body_of(expected)


def test_the_request_the_table_and_the_results_and_the_refusal(region: Region, triton_server: EmbeddedServer) -> None:
    region.record.begin(GENERATION + 1, TABLE[8:])
    check(sent(triton_server, REQUEST), REFUSAL)
    assert (region.record.started, region.record.completed) == (0, 0)
    region.array(DATA, (4,))[:] = [1, 2, 3, 4]
    region.record.begin(GENERATION, TABLE[8:])
    check(sent(triton_server, REQUEST), ANSWER)
    assert bytes(region.record.results)[: len(RESULTS)] == RESULTS
    (place,) = results.decode(bytes(region.record.results), [region.segment.byte_size]).outputs
    assert region.array(place.offset, place.shape).tolist() == [1, 2, 3, 4]


def test_the_batch(triton_server: EmbeddedServer) -> None:
    shape = (2, 3, 224, 224)
    nbytes = 4 * 2 * 3 * 224 * 224
    tensors = Table(
        {"INPUT0": InputSpan(dtypes.BY_NAME["FP32"], shape, 0, DATA, nbytes)},
        {"OUTPUT0": OutputSpan(0, DATA + nbytes, nbytes)},
    )
    with contextlib.closing(Region(2 * nbytes)) as region:
        region.array(DATA, shape)[:] = 21
        region.record.begin(GENERATION, table.encode(tensors))
        _, body = sent(triton_server, BATCH_REQUEST)
        assert json.loads(body) == {"model_name": "multiply", "model_version": "1", "outputs": []}
        assert (region.array(DATA + nbytes, shape) == 42).all()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (("shm_generation", 0), 400),
        (("shm_generation", 6), 400),
        (("shm_slot", "2/identity"), 400),
        pytest.param(("shm_slot", f"2/identity/shmbu-none/{'0' * 32}/0"), 404, marks=tells_404),
    ],
    ids=["table", "stale", "table again", "gone"],
)
def test_statuses_of_the_page(
    region: Region, triton_server: EmbeddedServer, change: tuple[str, Any], status: int
) -> None:
    region.record.begin(GENERATION, TABLE[8:])
    body = json.loads(body_of(REQUEST))
    body["parameters"][change[0]] = change[1]
    text = json.dumps(body)
    head = re.sub("Content-Length: .*", f"Content-Length: {len(text)}", REQUEST.partition("\n\n")[0])
    answer, body_text = sent(triton_server, f"{head}\n\n{text}")
    assert answer[0].split()[1] == str(status)
    rows = dict(re.findall(r"^\| `(shm:\w+)` \| \w+ \| (\d+) ", DOCUMENT, re.MULTILINE))
    code = json.loads(body_text)["error"].partition(": ")[0]
    assert rows[code] == str(status)


ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "tests" / "clients"
COMPILER: Final = shutil.which("gcc")
MODELS: Final = {"batch_witness", "handshake", "identity", "text_upper"}
"""What the program calls."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("client") / "client"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", f"-I{ROOT / 'docs'}"]
    subprocess.run([COMPILER, *flags, "-o", str(path), *map(str, sorted(FOLDER.glob("*.c")))], check=True, timeout=60)
    return path


@tells_404
@pytest.mark.parametrize("kind", ["system", "sealed"])
def test_a_client_in_c(program: Path, triton_server: EmbeddedServer, kind: str) -> None:
    for command in ("identity", "batch", "strings", "stale", "refused", "takeback"):
        call = [program, *triton_server.http_url.split(":"), kind, command]
        done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), command


def test_it_is_short_calls_these_models_and_needs_no_library() -> None:
    texts = [path.read_text() for path in FOLDER.glob("*.[ch]")]
    assert sum(len(text.splitlines()) for text in texts) <= 440
    assert {model for model in MODELS if any(f'"{model}"' in text for text in texts)} == MODELS
    own = {line for text in texts for line in text.splitlines() if line.startswith('#include "')}
    assert own == {'#include "shm_protocol.h"', '#include "desk.h"'}
