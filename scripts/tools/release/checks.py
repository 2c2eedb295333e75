"""The distributions: built to the same bytes by everybody, and checked before anybody gets them."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

_PACKAGES: Final = {"shm_backend_utils", "triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"}
_MARKERS: Final = {
    "shm_backend_utils/py.typed",
    "triton_python_backend_utils-stubs/__init__.pyi",
    "c_python_backend_utils-stubs/__init__.pyi",
}
_FIELDS: Final = (
    "Name",
    "Summary",
    "Description-Content-Type",
    "License-Expression",
    "Requires-Python",
    "Requires-Dist",
)
_SMOKE_TEST: Final = "import shm_backend_utils.model, shm_backend_utils.server, shm_backend_utils.cli.regions"


class BuildError(Exception):
    """The distributions cannot be built, or are not as they must be; the message is a line or two."""


def export(repository: Path, folder: Path) -> str:
    """Lay out what is committed in a folder, and return the time of the commit, in seconds since 1970."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=repository, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "--extract", "--no-same-permissions", "--directory", str(folder)], input=archive, check=True)
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build(source: Path, folder: Path, targets: tuple[str, ...], seconds: str, umask: int = 0o022) -> list[Path]:
    """Build distributions out of a folder, and return their files; BuildError with what the builder had to say."""
    options = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    done = subprocess.run(
        command, cwd=source, env=environment, umask=umask, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"the distributions cannot be built: {(done.stderr or done.stdout).strip()}")
    return sorted(folder.iterdir())


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def findings_in_wheel(wheel: Path, version: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_file,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(metadata_file))
    strange = {root for name in names if not (root := name.split("/")[0]).endswith(".dist-info")} - _PACKAGES
    findings = [f"{root} is in the wheel, and is none of its packages" for root in sorted(strange)]
    findings += [f"{name} is missing in the wheel" for name in sorted(_MARKERS - set(names))]
    findings += [f"{name} has no place in a wheel" for name in names if "__pycache__" in name]
    models = {name.rpartition("/")[0] for name in names if name.endswith("/config.pbtxt")}
    findings += [
        f"the model {model} has no code in the wheel"
        for model in sorted(models)
        if f"{model}/1/model.py" not in names and not Path(model).name.startswith("ensemble_")
    ]
    if not models:
        findings.append("there are no models in the wheel")
    if metadata["Version"] != version:
        findings.append(f"the wheel is of version {metadata['Version']}, and the package of {version}")
    findings += [f"the wheel's metadata have no {field}" for field in _FIELDS if not metadata[field]]
    return findings


def findings_in_changelog(text: str, version: str) -> list[str]:
    """Return what is wrong with the changelog: the version's own section needs a date and something in it."""
    section = re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        return [f"CHANGELOG.md has no section '## {version} (YEAR-MONTH-DAY)'"]
    return [] if section[1].strip() else [f"CHANGELOG.md says nothing of {version}"]


def findings_of_smoke_test(wheel: Path) -> list[str]:
    """Return what goes wrong where nothing of the checkout is found, but the wheel and this environment's NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:  # which is all that an installer does with it
            archive.extractall(folder)
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {_SMOKE_TEST}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return [f"the wheel's package fails: {done.stderr.strip().splitlines()[-1]}"] if done.returncode != 0 else []
