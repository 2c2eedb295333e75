"""``scripts/release``: the same bytes wherever and whenever they are built, and checks that can fail."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

import shm_backend_utils
from scripts.tools import ROOT
from scripts.tools.release import (
    BuildError,
    build,
    check_nothing_else_is_in,
    findings_in_changelog,
    findings_in_wheel,
    findings_of_smoke_test,
    release,
)

SECONDS = "1700000000"
SOURCES = ("shm_backend_utils", "stubs", "model_repository", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
VERSION = shm_backend_utils.__version__

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the distributions are made of, as it lies in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*SOURCES, "SECURITY.md"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = sorted(
        build(source, tmp_path_factory.mktemp("built"), ("sdist", "wheel"), SECONDS),
        key=lambda file: file.suffix == ".gz",
    )
    return sdist, wheel


def test_they_are_the_same_to_the_byte_whenever_built(source: Path, built: tuple[Path, Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere)
    for file in elsewhere.rglob("*"):
        file.chmod(0o700 if file.is_dir() or os.access(file, os.X_OK) else 0o600)
        os.utime(file, (1, 1))
    again = build(elsewhere, tmp_path / "again", ("sdist", "wheel"), SECONDS, umask=0o077)
    assert {file.name: file.read_bytes() for file in again} == {file.name: file.read_bytes() for file in built}


def test_nothing_is_wrong_with_this_wheel_and_this_changelog(built: tuple[Path, Path]) -> None:
    _, wheel = built
    assert wheel.name == f"triton_shm_backend_utils-{VERSION}-py3-none-any.whl"
    assert findings_in_wheel(wheel, VERSION) == []
    assert [name for name in zipfile.ZipFile(wheel).namelist() if "bench" in name] == []
    assert findings_of_smoke_test(wheel) == []
    assert findings_in_changelog((ROOT / "CHANGELOG.md").read_text(), VERSION) == []


def test_a_wheel_without_what_it_needs_is_found_out(built: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = built
    lame = tmp_path / wheel.name
    left_out = ("shm_backend_utils/py.typed", "shm_backend_utils/cli/model_repository/identity/1/model.py")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(lame, "w") as sink:
        for name in source.namelist():
            if name not in left_out and name != "shm_backend_utils/model/__init__.py":
                sink.writestr(name, source.read(name))
        sink.writestr("tests/__init__.py", "")
        sink.writestr("shm_backend_utils/model/__init__.py", "raise ImportError('lame')")
    assert findings_in_wheel(lame, "9") == [
        "tests is in the wheel, and is none of its packages",
        "shm_backend_utils/py.typed is missing in the wheel",
        "the model shm_backend_utils/cli/model_repository/identity has no code in the wheel",
        f"the wheel is of version {VERSION}, and the package of 9",
    ]
    assert findings_of_smoke_test(lame) == ["the wheel's package fails: ImportError: lame"]


@pytest.mark.parametrize("other", ["notes.txt", ".git/", "lost.whl/"])
def test_a_folder_that_has_something_else_is_not_emptied(other: str, tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    (tmp_path / "a.tar.gz").touch()
    (tmp_path / "SHA256SUMS").touch()
    check_nothing_else_is_in(tmp_path)
    check_nothing_else_is_in(tmp_path / "dist")
    place = tmp_path / other
    if other.endswith("/"):
        place.mkdir()
    else:
        place.touch()
    with pytest.raises(BuildError, match=f"has {place.name}, which would be lost"):
        release(tmp_path, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"a.whl", "a.tar.gz", "SHA256SUMS", place.name}
