"""docs/protocol.md is enough to write a client from: one in C, without this library, calls the real server's models."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.server import EmbeddedServer
from tests.releases import tells_404

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "tests" / "clients"
COMPILER: Final = shutil.which("gcc")
MODELS: Final = ("batch_witness", "handshake", "identity", "text_upper")
"""What the program calls."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("client") / "client"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", f"-I{ROOT / 'docs'}"]
    subprocess.run([COMPILER, *flags, "-o", str(path), *map(str, sorted(FOLDER.glob("*.c")))], check=True, timeout=60)
    return path


REFUSED: Final = pytest.param("refused", marks=tells_404)


@pytest.mark.parametrize("kind", ["system", "sealed"])
@pytest.mark.parametrize("command", ["identity", "batch", "strings", "stale", REFUSED, "takeback"])
def test_a_client_in_c(program: Path, triton_server: EmbeddedServer, kind: str, command: str) -> None:
    host, _, port = triton_server.http_url.partition(":")
    done = subprocess.run([program, host, port, kind, command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_it_is_short_calls_these_models_and_needs_no_library() -> None:
    texts = [path.read_text() for path in FOLDER.glob("*.[ch]")]
    assert sum(len(text.splitlines()) for text in texts) <= 440
    assert {model for model in MODELS if any(f'"{model}"' in text for text in texts)} == set(MODELS)
    own = {line for text in texts for line in text.splitlines() if line.startswith('#include "')}
    assert own == {'#include "shm_protocol.h"', '#include "desk.h"'}
