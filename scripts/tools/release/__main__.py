"""Build the distributions of what is committed, twice; check what is in them; say what they are to the byte."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import shm_backend_utils
from shm_backend_utils.cli.terminal import exit_status, undisturbed

from .. import ROOT
from .checks import BuildError, build, export, findings_in_changelog, findings_in_wheel, findings_of_smoke_test, unpack

_SUMS: Final = "SHA256SUMS"


def release(repository: Path, dist: Path) -> int:
    """Put the distributions into a folder, in the place of others, but of nothing else; return the exit status."""
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
    """Raise BuildError if a folder that is to be emptied has anything but distributions, as the checkout itself has."""
    for file in sorted(dist.iterdir()) if dist.exists() else []:
        if not (file.name == _SUMS or file.name.endswith((".whl", ".tar.gz"))) or file.is_dir():
            raise BuildError(f"{dist} has {file.name}, which would be lost; move it away, or give another --dist")


def _built_twice(repository: Path, folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution, out of which the same wheel is built, elsewhere and later."""
    seconds = export(repository, folder / "checkout")
    wheel, sdist = build(folder / "checkout", folder / "first", ("sdist", "wheel"), seconds)
    (again,) = build(unpack(sdist, folder / "unpacked"), folder / "second", ("wheel",), seconds, umask=0o077)
    if wheel.read_bytes() != again.read_bytes():
        raise BuildError("the wheel that is built of the source distribution is not the wheel of the checkout")
    return wheel, sdist


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument(
        "--dist",
        type=Path,
        metavar="DIR",
        default=ROOT / "dist",
        help="where to; older distributions go (default: dist)",
    )
    arguments = parser.parse_args()
    return exit_status(lambda: _release_what_is_committed(arguments.dist), BuildError, subprocess.CalledProcessError)


def _release_what_is_committed(dist: Path) -> int:
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    if changed:
        print(f"not committed, and so not released:\n{changed.rstrip()}", file=sys.stderr)
        return 1
    return release(ROOT, dist)


if __name__ == "__main__":
    sys.exit(main())
