"""Make an environment with what the tools need, and install the embedded server. It needs no installed package."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shm_backend_utils.cli.terminal import exit_status
from shm_backend_utils.errors import MachineError
from shm_backend_utils.server.install import default_folder
from shm_backend_utils.server.installation import Installation

from .. import ROOT
from ..processes import started


class StepFailedError(Exception):
    """A step of the setup failed; the message is what the command that failed had to say."""


@contextlib.contextmanager
def beside(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Have a program run beside a block; StepFailedError with its standard error if it fails."""
    with tempfile.TemporaryFile("w+") as errors, started(words, stdout=subprocess.DEVNULL, stderr=errors) as process:
        yield process
        if process.wait() != 0:
            errors.seek(0)
            printed = errors.read().strip()
            raise StepFailedError(printed or f"{words[0]} failed with status {process.returncode}")


def run(words: list[str]) -> None:
    with beside(words):
        pass


@dataclass(frozen=True)
class Contents:
    extras: str  # those of this distribution, which is installed as it lies in the checkout
    requirements: tuple[str, ...] = ()  # further ones
    alone: tuple[str, ...] = ()  # requirements that are installed without what they require in turn
    where_found: tuple[str, ...] = ()  # requirements that are left out if pip does not find them
    includes: tuple[Contents, ...] = ()  # what it is for as well. An environment that has these is extended

    def fingerprint(self) -> str:
        """Return what tells it from any other one, of this checkout and this Python."""
        version = re.search(r"^__version__.*$", (ROOT / "shm_backend_utils" / "__init__.py").read_text(), re.MULTILINE)
        packages = [self.extras, *self.requirements, *self.alone, *self.where_found]
        made_of = [(ROOT / "pyproject.toml").read_text(), version and version[0], sys.version, sys.base_prefix]
        return hashlib.sha256("\0".join(map(str, [*made_of, *packages])).encode()).hexdigest()


# scripts/bench compares with it. It requires all of tritonclient's extras and another NumPy, and uses none of that.
OTHER_CLIENT: Final = "triton-shm-client==0.1.0"
COMMANDS: Final = Contents("demo", ("numpy>=2",))
"""What ``scripts/demo`` and ``serve`` need: to try the demo, you need not wait for PyTorch."""
EVERYTHING: Final = Contents(
    "dev",
    ("numpy>=2", "cuda-bindings>=13"),
    (OTHER_CLIENT,),
    ("torch==2.13.0+cpu", "cupy-cuda12x==14.2.0"),  # other builds of torch bring gigabytes for GPUs
    includes=(COMMANDS,),
)
EVERYTHING_WITH_NUMPY_1: Final = Contents("dev", ("numpy==1.26.4", "cuda-bindings<13"), (OTHER_CLIENT,))


class Environment:
    """A virtual environment in the checkout. What it has been made for is in its stamp, which is written last."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / name
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "made-by-scripts-setup"

    def has(self, contents: Contents) -> bool:
        return self._stamp.is_file() and contents.fingerprint() in self._stamp.read_text().splitlines()

    def stamp(self, contents: Contents) -> None:
        """Write the stamp: the environment is complete."""
        self._stamp.write_text("".join(f"{each.fingerprint()}\n" for each in (contents, *contents.includes)))

    def create(self) -> None:
        """Make it anew, with a new pip and nothing else; a link stays, as it may lead to another checkout's."""
        if self.folder.is_symlink():
            raise StepFailedError(
                f"{self.folder} is a link to {self.folder.resolve()}, and making it anew would empty that folder: "
                "remove the link first"
            )
        self._stamp.unlink(missing_ok=True)
        has_ensurepip = importlib.util.find_spec("ensurepip") is not None  # Debian has it in a package of its own
        venv.create(self.folder, clear=True, symlinks=True)
        if has_ensurepip:  # that one is as old as Python's release, and needs three times as long to choose packages
            run([str(self.python), "-Im", "ensurepip", "--upgrade", "--default-pip"])
            run(self._pip_install("--upgrade", "pip"))
        else:
            run([sys.executable, "-m", "pip", "--python", str(self.python), "install", "pip"])

    def install(self, contents: Contents) -> None:
        """Install packages. It counts as made for nothing meanwhile."""
        self._stamp.unlink(missing_ok=True)
        run(self._pip_install("--editable", f"{ROOT}[{contents.extras}]", *contents.requirements))
        if contents.alone:
            run(self._pip_install("--no-deps", *contents.alone))
        for requirement in contents.where_found:
            with contextlib.suppress(StepFailedError):
                run(self._pip_install(requirement))

    def _pip_install(self, *arguments: str) -> list[str]:
        # --no-compile: Python compiles what it imports when it does, and that is a fraction of what is installed.
        options = ["--no-input", "--no-compile", "--disable-pip-version-check", "--progress-bar", "off"]
        return [str(self.python), "-m", "pip", "install", *options, *arguments]


def server_is_installed() -> bool:
    """Return whether the embedded server for this Python, which is also the environment's, is in its place."""
    try:
        return Installation(default_folder()).is_complete
    except MachineError as error:  # there is no such version
        raise StepFailedError(str(error)) from None


def set_up(environment: Environment, contents: Contents) -> None:
    """Do what is still to be done, and name each step. The server is fetched while pip installs packages."""
    is_made = environment.has(contents)
    is_begun = is_made or any(environment.has(included) for included in contents.includes)
    is_served = server_is_installed()
    if is_made and is_served:
        return
    if not is_begun:
        _say(f"make {environment.folder.name}")
        environment.create()
    with beside([str(environment.python), "-m", "scripts.tools.setup.install_server"]):
        if not is_made:
            _say("install packages")
            environment.install(contents)
            environment.stamp(contents)
        if not is_served:
            _say("install the server")


def _say(step: str) -> None:
    print(f"scripts/setup: {step}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Set up the checkout.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--commands", action="store_true", help="have in .venv only what scripts/demo and serve need")
    kinds.add_argument("--numpy1", action="store_true", help="make .venv-numpy1 instead: the same with NumPy 1.26")
    parser.add_argument("--python", metavar="VERSION", help="make .venv-pyVERSION instead: the same with that Python")
    arguments = parser.parse_args()
    contents = EVERYTHING_WITH_NUMPY_1 if arguments.numpy1 else COMMANDS if arguments.commands else EVERYTHING
    name = ".venv" if arguments.python is None else f".venv-py{arguments.python}"  # scripts/setup has found that Python
    if arguments.numpy1:
        name += "-numpy1"

    def program() -> int:
        fcntl.flock(os.open(ROOT, os.O_RDONLY), fcntl.LOCK_EX)  # a second script that starts waits for the first
        set_up(Environment(name), contents)
        return 0

    return exit_status(program, StepFailedError)


if __name__ == "__main__":
    sys.exit(main())
