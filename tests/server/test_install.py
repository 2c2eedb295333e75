"""Installing the embedded server: where to, from a small wheel; and folders that are said to hold one."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation, find_release, install
from shm_backend_utils.server import wheels as wheels_of_servers
from shm_backend_utils.server.install import FOLDER_VARIABLE, default_folder
from shm_backend_utils.server.installation import PYTHON
from shm_backend_utils.server.wheels import DEFAULT, RELEASES, VERSION_VARIABLE
from tests.server.conftest import make_wheel

TRITONS = [release.triton for release in RELEASES.values()]
STUBS = "pytriton/tritonserver/python_backend_stubs"


def server_wheel(folder: Path, *files: str, version: str = DEFAULT) -> Path:
    return make_wheel(folder, "nvidia_pytriton", version, *files)


def expect(monkeypatch: pytest.MonkeyPatch, *wheels: Path) -> None:
    """Have these be the wheels that the releases are known by."""
    digests = frozenset(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    expected = {version: replace(release, digests=digests) for version, release in RELEASES.items()}
    monkeypatch.setattr(wheels_of_servers, "RELEASES", expected)


SMALL = (
    "pytriton/__init__.py",
    "pytriton/tritonserver/bin/tritonserver",
    "pytriton/tritonserver/backends/python/libtriton_python.so",
    "pytriton/tritonserver/backends/python/triton_python_backend_utils.py",
    f"{STUBS}/{PYTHON}/triton_python_backend_stub",
    f"{STUBS}/2.7/triton_python_backend_stub",
    "nvidia_pytriton.libs/libb64.so",
)


@pytest.fixture
def small_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only wheel, and the one that is expected."""
    wheel = server_wheel(wheels, *SMALL)
    expect(monkeypatch, wheel)
    return wheel


@pytest.mark.parametrize(
    ("named", "cache", "folder"),
    [
        ("/elsewhere", "/cache", "/elsewhere"),
        ("~/server", None, "~/server"),
        (None, "/cache", f"/cache/shm-backend-utils/tritonserver-{TRITONS[-1]}-py{PYTHON}"),
        ("", "/cache", f"/cache/shm-backend-utils/tritonserver-{TRITONS[-1]}-py{PYTHON}"),
        (None, None, f"~/.cache/shm-backend-utils/tritonserver-{TRITONS[-1]}-py{PYTHON}"),
    ],
)
def test_the_folder_is_the_one_that_is_named_or_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, named: str | None, cache: str | None, folder: str
) -> None:
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)
    for name, value in ((FOLDER_VARIABLE, named), ("XDG_CACHE_HOME", cache)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert default_folder() == Path(folder).expanduser()


@pytest.mark.usefixtures("small_wheel")
def test_install_lays_out_the_server_its_libraries_and_this_pythons_stub_though_two_do_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        installation, other = threads.map(install, [tmp_path / "a" / "server"] * 2)
    assert installation.is_complete
    assert other == installation
    folder = installation.folder
    assert os.access(installation.binary, os.X_OK)
    assert os.access(installation.backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert list((tmp_path / "a").iterdir()) == [folder]
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    of_the_server = ("bin/tritonserver", *(f"backends/python/{name}" for name in BACKEND if "stub" not in name))
    assert files == {
        **{name: f"pytriton/tritonserver/{name}" for name in of_the_server},
        "lib/libb64.so": "nvidia_pytriton.libs/libb64.so",
        "backends/python/triton_python_backend_stub": f"{STUBS}/{PYTHON}/triton_python_backend_stub",
    }


@pytest.mark.usefixtures("wheels")
def test_a_complete_installation_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tritonserver").write_text("mine")
    assert install(folder) == Installation(folder)
    assert [file.read_text() for file in folder.rglob("*") if file.is_file()] == ["mine"]


def no_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"cannot fetch the wheel nvidia-pytriton=={find_release().version}, .*: ERROR: "


def no_stub(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    stubs = [f"{STUBS}/{python}/triton_python_backend_stub" for python in ("3.100", "2.7", "3.8")]
    expect(monkeypatch, server_wheel(wheels, "pytriton/tritonserver/bin/tritonserver", f"{STUBS}/", *stubs))
    return re.escape(f"no stub for Python {PYTHON}; it has them for 2.7, 3.8, 3.100:")


def another_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    digest = hashlib.sha256(server_wheel(wheels, *SMALL).read_bytes()).hexdigest()
    return f"is not the one .* its SHA-256 is {digest}, expected .* or .*; check which"


@pytest.mark.parametrize("given", [no_wheel, no_stub, another_wheel])
def test_a_wheel_that_will_not_do_is_an_error_of_the_machine_and_leaves_nothing(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    with pytest.raises(MachineError, match=given(wheels, monkeypatch)):
        install(tmp_path / "a" / "server")
    assert list((tmp_path / "a").iterdir()) == []


def test_versions_are_installed_side_by_side(wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expect(monkeypatch, *[server_wheel(wheels, *SMALL, version=version) for version in RELEASES])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "elsewhere"))
    folders = [install(version=version).folder for version in RELEASES]
    assert [folder.name for folder in folders] == [f"tritonserver-{triton}-py{PYTHON}" for triton in TRITONS]
    assert sorted(folders) == sorted((tmp_path / "shm-backend-utils").iterdir())


def test_the_environment_names_a_version_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(VERSION_VARIABLE, "0.5.0")
    assert default_folder() == default_folder("0.5.0")
    assert find_release().triton == "2.41.0"
    expected = r"no server '2.51.0' to install; expected .*'s 0.5.0 \(Triton 2.41.0\) or 0.7.0 \(Triton 2.51.0\)"
    with pytest.raises(MachineError, match=expected):
        install(tmp_path / "server", version="2.51.0")


def test_the_servers_environment_finds_this_interpreter_and_its_libraries_first() -> None:
    installation = install()
    environment = installation.environment()
    found = subprocess.run(
        ["python3", "-c", "import sys; print(sys.prefix)"], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == sys.prefix
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == str(installation.folder / "lib")


@pytest.mark.parametrize(("given", "found"), [("/opt/cuda/lib", ["/opt/cuda/lib"]), ("", []), (None, [])])
def test_libraries_on_the_launchers_path(given: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if given is not None:
        monkeypatch.setenv("LD_LIBRARY_PATH", given)
    assert install().environment()["LD_LIBRARY_PATH"].split(":")[2:] == found


BACKEND: Final = ("libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py")
ARM_64: Final = b"\xb7\0"
MACHINE_OF_ELF: Final = slice(18, 20)


def program(path: Path, *lines: str) -> None:
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


def is_of_another_architecture(server: Installation) -> None:
    head = bytearray(install().binary.read_bytes()[:4096])
    head[MACHINE_OF_ELF] = ARM_64
    server.binary.write_bytes(head)


def stub_of(server: Installation) -> Path:
    return server.backends / "python" / "triton_python_backend_stub"


GLIBC: Final = "/lib/libc.so.6: version `GLIBC_2.99' not found"
BROKEN: Final[list[tuple[Callable[[Installation], object], str]]] = [
    (lambda server: shutil.rmtree(server.folder / "bin"), "is not a server's folder: it has no bin/tritonserver"),
    (is_of_another_architecture, r"bin/tritonserver cannot be executed here \(Exec format error\): is it built for "),
    (lambda server: program(server.binary, "usage: x"), "asked for its version, it says 'usage: x'"),
    (lambda server: server.binary.chmod(0o644), r"bin/tritonserver may not be executed: chmod \+x it"),
    (  # without the libraries beside it
        lambda server: shutil.copy(install().binary, server.binary),
        r"bin/tritonserver cannot be loaded: lib\S+\.so\S*: cannot open .*; install it, or put it into ",
    ),
    (lambda server: program(server.binary, f"x: {GLIBC} (by it)"), f"built on a newer system than this: {GLIBC}"),
    (lambda server: shutil.rmtree(server.backends), "is Triton 2.99.1dev without Python backend: no .*/libtriton_p"),
    (lambda server: stub_of(server).unlink(), "is Triton 2.99.1dev without Python backend: no .*/triton_python_b"),
    (
        lambda server: program(stub_of(server), "libpython3.8.so.1.0"),
        rf"runs Python 3\.8, and this is Python {PYTHON}: use that one, or put a stub for ",
    ),
]


@pytest.mark.parametrize(("break_it", "told"), BROKEN)
def test_a_folder_that_will_not_do_is_told_in_a_line(
    break_it: Callable[[Installation], object], told: str, server: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(server)
    monkeypatch.setenv(FOLDER_VARIABLE, str(server.folder))
    with pytest.raises(MachineError, match=told) as error:
        install()
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_that_will_do_is_taken_and_has_what_its_triton_and_older_ones_have(
    server: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(server.folder))
    assert install() == server
    assert server.triton == "2.99.1dev"
    assert all(map(server.is_at_least, ("2.98", "2.9", "2.99.1")))
    assert not any(map(server.is_at_least, ("2.99.2", "2.100", "3")))


def test_the_server_that_is_installed_runs_here_and_is_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    installation = Installation(install().folder)
    installation.check()
    assert installation.triton == find_release().triton == install().triton
