"""docs/deploy/docker: hadolint's word on the Dockerfile, and the wheel that it builds, out of what it copies alone."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.wheels import build_wheel

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docs" / "deploy" / "docker" / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")


def copied_from_the_checkout() -> list[tuple[list[str], str]]:
    """Return what each COPY of the build's context takes, and where to."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return [(words[:-1], words[-1]) for words in (line.split() for line in lines)]


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_that_is_copied_is_there_and_none_of_it_ignored() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    for names, _ in copied_from_the_checkout():
        for name in names:
            assert (ROOT / name).exists(), name
            assert any(name == start or fnmatch.fnmatch(name, f"{start}/*") for start in kept), name


def test_the_wheel_is_built_of_what_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for names, target in copied_from_the_checkout():
        if target.startswith("./"):
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, source / target)
    with zipfile.ZipFile(build_wheel(source, tmp_path)) as archive:
        names = archive.namelist()
    assert "shm_backend_utils/model/__init__.py" in names
    assert "triton_python_backend_utils-stubs/__init__.pyi" in names
