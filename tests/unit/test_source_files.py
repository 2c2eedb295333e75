"""What is read as a source: regular files of a usual size, and nothing that has no end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shm_backend_utils.repository.files import MOST_BYTES, NoSourceError, read_source


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def one_byte_too_large(file: Path) -> None:
    file.touch()
    os.truncate(file, MOST_BYTES + 1)


@pytest.mark.parametrize("make", [pipe, device, huge, one_byte_too_large, Path.mkdir], ids=lambda make: make.__name__)
def test_what_is_no_source(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(NoSourceError):
        read_source(tmp_path / "x")


def test_the_largest_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", MOST_BYTES)
    (tmp_path / "y").symlink_to("x")
    assert len(read_source(tmp_path / "y")) == MOST_BYTES
