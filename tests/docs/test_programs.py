"""The programs of each page do what the page says, with its models in a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from shm_backend_utils.server import EmbeddedServer
from tests.crash.servers import installation_with

from .documents import PAGES, ROOT, Block, blocks, name_of

BY_OTHERS = ("run by", "not run")

# A page has up to five programs, and each begins with what the earlier ones did.
pytestmark = pytest.mark.timeout(600)


class PagesServer:
    """A server that loads models when it is told to, with the NumPy that every model works with."""

    def __init__(self, server: EmbeddedServer, client: Any, models: Path) -> None:
        self._server, self._client, self._models = server, client, models

    @contextmanager
    def serving(self, models: Path, code: str) -> Iterator[None]:
        """Serve the models in a folder, and the sample models that code names and that are not there."""
        models.mkdir(exist_ok=True)
        for sample in (ROOT / "model_repository").iterdir():
            ours = models / sample.name
            if ours.exists() and not (ours / "config.pbtxt").exists() and "auto_complete" not in code:
                shutil.copy(sample / "config.pbtxt", ours)
            if f'"{sample.name}"' in code and not ours.exists():
                shutil.copytree(sample, ours, ignore=shutil.ignore_patterns("__pycache__"))
        names = sorted(model.name for model in models.iterdir())
        for name in names:
            shutil.copytree(models / name, self._models / name)
            self._client.load_model(name)
        try:
            yield
        finally:
            for name in names:
                self._client.unload_model(name)
                shutil.rmtree(self._models / name)

    def addressed(self, code: str) -> str:
        """Return code in which the addresses of a server on the usual ports are this one's."""
        usual = {"localhost:8000": self._server.http_url, "localhost:8001": self._server.grpc_url}
        for address, here in usual.items():
            code = code.replace(address, here.removeprefix("http://"))
        return code


@pytest.fixture(scope="module")
def pages_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PagesServer]:
    """A server that serves the models of one page after another."""
    folder = tmp_path_factory.mktemp("pages")
    models, log_file = folder / "models", folder / "server.log"
    models.mkdir()
    installation = installation_with(["--model-control-mode=explicit"], folder / "installation")
    with (
        EmbeddedServer.start(models, installation=installation, log_file=log_file) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc_url) as client,
    ):
        yield PagesServer(server, client, models)


def programs(page: Path) -> list[Block]:
    """Return what of a page is written to files, run, and compared with what is printed, in order."""
    ours = [block for block in blocks(page) if block.mark not in BY_OTHERS]
    return [block for block in ours if block.mark is not None or block.language == "python"]


WITH_PROGRAMS = [page for page in PAGES if any(block.language == "python" for block in programs(page))]


def run(program: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_a_pages_programs_run_and_print_what_it_says(page: Path, pages_server: PagesServer, tmp_path: Path) -> None:
    parts = programs(page)
    for block in parts:
        if block.mark in ("file", "program"):
            path = tmp_path / block.said
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages_server.addressed(block.code))
    code = "".join(block.code for block in parts if block.language == "python")
    with pages_server.serving(tmp_path / "models", code):
        before, printed = "", ""
        for number, block in enumerate(parts):
            if block.mark == "prints":
                assert printed == block.code, block
            elif block.mark is None:
                before, printed = in_turn(block, before, pages_server, tmp_path / f"program_{number}.py")
            elif block.mark == "program":
                printed = run(tmp_path / block.said, tmp_path)


def in_turn(block: Block, before: str, server: PagesServer, program: Path) -> tuple[str, str]:
    """Run a block behind those before it; return all of them, and what it has printed itself."""
    mark = "-- this block --"
    own = server.addressed(block.code)
    program.write_text(f"{before}\nprint({mark!r})\n{own}")
    _, _, printed = run(program, program.parent).partition(f"{mark}\n")
    return before + own, printed
