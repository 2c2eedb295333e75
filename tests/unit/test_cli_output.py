"""What the command cannot write is one line and a status, or nothing where nobody reads on."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = [["regions"], ["top", "--once", "--interval", "0.1"]]


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "shm_backend_utils", *words]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(words), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"shm-backend-utils {words[0]}: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_who_reads_no_further_is_told_nothing(words: list[str]) -> None:
    with subprocess.Popen(command(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
