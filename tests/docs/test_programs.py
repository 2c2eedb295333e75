"""The programs of each page do what the page says, with its models in a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PagesServer
from .documents import PAGES, Block, blocks, name_of

BY_OTHERS = ("run by", "not run")

# A page has up to five programs, and each begins with what the earlier ones did.
pytestmark = pytest.mark.timeout(600)


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
