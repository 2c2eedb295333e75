"""Build the distributions of the commit twice, check their contents, and print their checksums."""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import shm_backend_utils
from shm_backend_utils.cli.terminal import exit_status, undisturbed

from . import ROOT

_STUBS: Final = {"triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"}
_MARKERS: Final = {"shm_backend_utils/py.typed", *(f"{stubs}/__init__.pyi" for stubs in _STUBS)}
_SMOKE_TEST: Final = "import shm_backend_utils.model, shm_backend_utils.server, shm_backend_utils.cli.regions"


class BuildError(Exception):
    """The distributions cannot be built, or are not as they must be; the message is a line or two."""


def export(repository: Path, folder: Path) -> str:
    """Extract the committed files into a folder, and return the time of the commit, in seconds since 1970."""
    folder.mkdir(parents=True)
    archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=repository)
    subprocess.run(["tar", "--extract", "--no-same-permissions", "--directory", str(folder)], input=archive, check=True)
    return subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=repository, text=True).strip()


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
    roots = {root for name in names if not (root := name.split("/")[0]).endswith(".dist-info")}
    strange = roots - {"shm_backend_utils", *_STUBS}
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
    fields = "Name", "Summary", "Description-Content-Type", "License-Expression", "Requires-Python", "Requires-Dist"
    findings += [f"the wheel's metadata have no {field}" for field in fields if not metadata[field]]
    return findings


def findings_in_changelog(text: str, version: str) -> list[str]:
    """Return what is wrong with the changelog: the version's own section needs a date and something in it."""
    section = re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        return [f"CHANGELOG.md has no section '## {version} (YEAR-MONTH-DAY)'"]
    return [] if section[1].strip() else [f"CHANGELOG.md says nothing of {version}"]


def findings_of_smoke_test(wheel: Path) -> list[str]:
    """Return the errors of the wheel's package where Python finds only the wheel and this environment's NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:  # which is all that an installer does with it
            archive.extractall(folder)
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {_SMOKE_TEST}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return [f"the wheel's package fails: {done.stderr.strip().splitlines()[-1]}"] if done.returncode != 0 else []


_SUMS: Final = "SHA256SUMS"


def release(repository: Path, dist: Path) -> int:
    """Put the distributions into a folder, replacing older ones, but nothing else; return the exit status."""
    check_nothing_else_is_in(dist)
    folder = Path(tempfile.mkdtemp(prefix="shm-backend-utils-release-"))
    try:
        wheel, sdist = _built_twice(repository, folder)
        version = shm_backend_utils.__version__
        findings = [
            *findings_in_wheel(wheel, version),
            *findings_in_changelog((repository / "CHANGELOG.md").read_text(), version),
            *findings_of_smoke_test(wheel),
        ]
        if findings:
            print("\n".join(findings), file=sys.stderr)
            return 1
        check_nothing_else_is_in(dist)
        if dist.exists():
            shutil.rmtree(dist)
        dist.mkdir(parents=True)
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in (sdist, wheel)]
        for file in (sdist, wheel):
            shutil.copy(file, dist)
    finally:
        with undisturbed():
            shutil.rmtree(folder)
    (dist / _SUMS).write_text("\n".join([*sums, ""]))
    print("\n".join(sums))
    return 0


def check_nothing_else_is_in(dist: Path) -> None:
    """Raise BuildError if a folder that would be emptied has anything but distributions, like the checkout itself."""
    for file in sorted(dist.iterdir()) if dist.exists() else []:
        if not (file.name == _SUMS or file.name.endswith((".whl", ".tar.gz"))) or file.is_dir():
            raise BuildError(f"{dist} has {file.name}, which would be lost; move it away, or give another --dist")


def _built_twice(repository: Path, folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution; check that the latter yields the same wheel elsewhere and later."""
    seconds = export(repository, folder / "checkout")
    wheel, sdist = build(folder / "checkout", folder / "first", ("sdist", "wheel"), seconds)
    (again,) = build(unpack(sdist, folder / "unpacked"), folder / "second", ("wheel",), seconds, umask=0o077)
    if wheel.read_bytes() != again.read_bytes():
        raise BuildError("the wheel that is built of the source distribution is not the wheel of the checkout")
    return wheel, sdist


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    told = "where to; older distributions go (default: dist)"
    parser.add_argument("--dist", type=Path, metavar="DIR", default=ROOT / "dist", help=told)
    arguments = parser.parse_args()
    return exit_status(lambda: _release_what_is_committed(arguments.dist), BuildError, subprocess.CalledProcessError)


def _release_what_is_committed(dist: Path) -> int:
    changed = subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True)
    if changed:
        print(f"not committed, and so not released:\n{changed.rstrip()}", file=sys.stderr)
        return 1
    return release(ROOT, dist)


if __name__ == "__main__":
    sys.exit(main())
