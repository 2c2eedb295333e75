"""What processes have mapped, where a file's name is made to look like something else."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from shm_backend_utils.cli.shared_memory.processes import look_into_processes


@pytest.mark.parametrize("odd", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"], ids=ascii)
@pytest.mark.parametrize("line", ["0-1000 r 0 0:1 1 ", "0-1 r 0 ffffffffffff:ffffffffffff 1 "], ids=["own", "large"])
def test_a_file_whose_name_seems_to_be_a_line_of_its_own(odd: str, line: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a{odd}{line}" / "dev" / "shm"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(4096))
    before = {each.identity for each in look_into_processes([os.getpid()]).found[0].mapped}
    with (folder / "x").open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        (found,) = look_into_processes([os.getpid()]).found
    assert {each.identity for each in found.mapped} == before
