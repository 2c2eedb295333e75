"""The command line: names which others have chosen do nothing to a terminal."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm_backend_utils import cli
from shm_backend_utils.cli import regions
from shm_backend_utils.cli.shared_memory import pools, processes
from shm_backend_utils.memory import reaper
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.protocol import layout
from shm_backend_utils.protocol.layout import Header


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="regions-", dir="/dev/shm"))
    monkeypatch.setattr(reaper, "DEV_SHM", folder)
    monkeypatch.setattr(pools, "DEV_SHM", folder)
    monkeypatch.setattr(processes, "_PROC", folder)  # nor are there other processes
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["shmbu-\x1b[31mred", "shmbu-two\nlines", "shmbu-\u202ebackwards", "shmbu-\udcff"])
def test_names_are_printed_without_what_a_terminal_obeys(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = layout.data_offset(1, layout.PAGE_SIZE)
    memory = bytearray(size)
    layout.write_header(memoryview(memory), Header(1, size, bytes(16)))
    (folder / name).write_bytes(memory)
    registered = {f"{name} as": Registration(f"/{name}", 0, size)}
    monkeypatch.setattr(regions, "fetch_registrations", lambda url: registered)
    assert cli.main(["regions", "--url", "http://localhost"]) == 0
    _, row, _ = capsys.readouterr().out.splitlines()
    assert row.isprintable()
    assert row.count(repr(name)[1:-1]) == 2
