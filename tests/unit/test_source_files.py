"""What is read as a source: regular files of a usual size, and nothing that has no end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shm_backend_utils.repository.source_files import MOST_BYTES, NoSourceError, read_source


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


def test_a_socket_cannot_be_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x"))
        with pytest.raises(OSError, match="No such device"):
            read_source(tmp_path / "x")


def test_the_largest(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", MOST_BYTES)
    assert len(read_source(tmp_path / "x")) == MOST_BYTES


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "y").symlink_to("x")
    assert read_source(tmp_path / "y") == b"abc"
