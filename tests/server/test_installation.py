"""Folders that are said to hold a server: which version it is, and one line for each that is none, or not for here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation, find_release, install
from shm_backend_utils.server.install import FOLDER_VARIABLE
from shm_backend_utils.server.installation import PYTHON
from shm_backend_utils.server.stub_numpy import is_there_another, reads_own, wants_another

BACKEND: Final = ("libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py")
ARM_64: Final = b"\xb7\0"
MACHINE_OF_ELF: Final = slice(18, 20)


def program(path: Path, *lines: str) -> None:
    """Write a program that prints these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", "cat <<'END'", *lines, "END", ""]))
    path.chmod(0o755)


def tells(version: str) -> str:
    return f"| server_version                   | {version}     |"


@pytest.fixture
def server(tmp_path: Path) -> Installation:
    """One that looks whole."""
    made = Installation(tmp_path / "server")
    program(made.binary, "+---+", tells("2.99.1dev"), "+---+", "error: creating server: no models")
    for name in BACKEND:
        program(made.backends / "python" / name, f"libpython{PYTHON}.so.1.0")
    return made


def has_nothing(server: Installation) -> None:
    shutil.rmtree(server.folder / "bin")


def is_of_another_architecture(server: Installation) -> None:
    head = bytearray(install().binary.read_bytes()[:4096])
    head[MACHINE_OF_ELF] = ARM_64
    server.binary.write_bytes(head)


def is_another_program(server: Installation) -> None:
    program(server.binary, "usage: something else")


def may_not_be_executed(server: Installation) -> None:
    server.binary.chmod(0o644)


def lacks_its_library(server: Installation) -> None:
    shutil.copy(install().binary, server.binary)  # without those beside it


def needs_a_newer_system(server: Installation) -> None:
    program(server.binary, "bin/tritonserver: /lib/libc.so.6: version `GLIBC_2.99' not found (required by it)")


def has_no_backend(server: Installation) -> None:
    shutil.rmtree(server.backends)


def has_no_stub(server: Installation) -> None:
    (server.backends / "python" / "triton_python_backend_stub").unlink()


def has_a_stub_that_may_not_be_executed(server: Installation) -> None:
    (server.backends / "python" / "triton_python_backend_stub").chmod(0o644)


def is_for_another_python(server: Installation) -> None:
    program(server.backends / "python" / "triton_python_backend_stub", "libpython3.8.so.1.0")


def has_a_stub_without_its_library(server: Installation) -> None:
    program(
        server.backends / "python" / "triton_python_backend_stub",
        "stub: error while loading shared libraries: libz.so.9: cannot open shared object file: No such file",
    )


BROKEN: Final[dict[Callable[[Installation], None], str]] = {
    has_nothing: "is no server's folder: it has no bin/tritonserver",
    is_of_another_architecture: r"bin/tritonserver cannot be executed here \(Exec format error\): is it built for ",
    is_another_program: "is no tritonserver: asked for its version, it says 'usage: something else'",
    may_not_be_executed: r"bin/tritonserver may not be executed: chmod \+x it",
    lacks_its_library: r"bin/tritonserver cannot be loaded: lib\S+\.so\S*: cannot open .*; install it, or put it into ",
    needs_a_newer_system: "built on a newer system than this: /lib/libc.so.6: version `GLIBC_2.99' not found",
    has_no_backend: "is Triton 2.99.1dev without Python backend: no backends/python/libtriton_python.so",
    has_no_stub: "is Triton 2.99.1dev without Python backend: no backends/python/triton_python_backend_stub",
    has_a_stub_that_may_not_be_executed: r"triton_python_backend_stub may not be executed: chmod \+x it",
    is_for_another_python: rf"runs Python 3\.8, and this is Python {PYTHON}: use that one, or put a stub for ",
    has_a_stub_without_its_library: r"backend_stub cannot be loaded: libz\.so\.9: cannot open .*; install it",
}


@pytest.mark.parametrize("breaks", BROKEN)
def test_a_folder_that_will_not_do_is_told_in_a_line(
    breaks: Callable[[Installation], None], server: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(server)
    monkeypatch.setenv(FOLDER_VARIABLE, str(server.folder))
    with pytest.raises(MachineError, match=BROKEN[breaks]) as told:
        install()
    assert len(str(told.value).splitlines()) == 1


def test_a_folder_that_will_do_is_taken(server: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(server.folder))
    assert install() == server
    assert server.triton == "2.99.1dev"


def test_the_server_that_is_installed_runs_here_and_is_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    installation = Installation(install().folder)
    installation.check()
    assert installation.triton == find_release().triton == install().triton


@pytest.mark.parametrize(
    ("triton", "is_there"),
    [("2.41", True), ("2.9", True), ("2.41.0", True), ("2.41.1", False), ("2.46", False), ("3", False)],
)
def test_a_server_has_what_its_triton_and_older_ones_have(server: Installation, triton: str, is_there: bool) -> None:
    program(server.binary, tells("2.41.0dev"))
    assert server.is_at_least(triton) is is_there


@pytest.mark.parametrize(("version", "needs_numpy_1"), [("2.51.0", True), ("2.52.0", False), ("2.73.0dev", False)])
def test_stubs_before_2_52_read_numpy_1_alone(server: Installation, version: str, needs_numpy_1: bool) -> None:
    program(server.binary, tells(version))
    assert wants_another(server) is (needs_numpy_1 and is_there_another())
    assert reads_own(server) or needs_numpy_1
