"""Make an environment with everything that the tools need, and install the embedded server. Standard library only.

Says nothing when there is nothing to do. An environment counts as made when its stamp says so, which is written last:
whatever was interrupted or failed is started over.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable

from .. import ROOT
from .progress import Progress

INSTALL_SERVER = "scripts.tools.setup.install_server"
# What scripts/bench and tests compare with. It requires all of tritonclient's extras, CUDA's packages among them, and
# another NumPy; it uses none of that.
OTHER_CLIENT = "triton-shm-client==0.1.0"
# What tests exchange tensors with. Only where pip finds the build for CPUs: the others bring gigabytes for GPUs.
TORCH = "torch==2.13.0+cpu"
# What tests of GPU memory compare with: it describes arrays and streams without a GPU as well.
CUPY = "cupy-cuda12x==14.2.0"
# NVIDIA's bindings of the driver in both forms, as both are supported, and differ in names and types.
BINDINGS_OF_CUDA_12 = "cuda-bindings<13"
BINDINGS_OF_CUDA_13 = "cuda-bindings>=13"


class StepFailedError(Exception):
    """A step of the setup failed; the message is what the command that failed had to say."""


class Environment:
    """A virtual environment in the checkout, and what is to be installed in it.

    Parameters
    ----------
    alone : list of str
        Requirements that are installed without what they require in turn.
    where_found : list of str
        Requirements that are done without where pip does not find them.
    """

    def __init__(self, name: str, requirements: list[str], alone: list[str], where_found: list[str]) -> None:
        self.folder = ROOT / name
        self.python = self.folder / "bin" / "python"
        self.requirements = ["--editable", f"{ROOT}[dev]", *requirements]
        self.alone = alone
        self.where_found = where_found
        self._stamp = self.folder / "made-by-scripts-setup"

    def is_made(self) -> bool:
        """Return whether it is there and made of what is asked for now."""
        return self._stamp.is_file() and self._stamp.read_text() == self._fingerprint()

    def stamp(self) -> None:
        """Declare it made."""
        self._stamp.write_text(self._fingerprint())

    def create(self) -> None:
        """Make it anew, without packages.

        Raises
        ------
        StepFailedError
            It is a link: what it leads to may be another checkout's, and stays as it is. Or it cannot be made.
        """
        if self.folder.is_symlink():
            raise StepFailedError(
                f"{self.folder} is a link to {self.folder.resolve()}, and making it anew would empty that folder: "
                "remove the link first"
            )
        self._stamp.unlink(missing_ok=True)
        has_ensurepip = importlib.util.find_spec("ensurepip") is not None  # Debian has it in a package of its own
        try:
            venv.create(self.folder, clear=True, symlinks=True, with_pip=has_ensurepip)
        except subprocess.CalledProcessError as error:
            raise StepFailedError(f"{error}\n{(error.output or b'').decode(errors='replace')}") from None
        if not has_ensurepip:
            run([sys.executable, "-m", "pip", "--python", str(self.python), "install", "pip"], lambda line: None)

    def install_packages(self, on_line: Callable[[str], None]) -> None:
        """Install what it is for."""
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        pip_install = [str(self.python), "-m", "pip", "install", *options]
        run([*pip_install, *self.requirements], on_line)
        if self.alone:
            run([*pip_install, "--no-deps", *self.alone], on_line)
        for requirement in self.where_found:
            with contextlib.suppress(StepFailedError):
                run([*pip_install, requirement], on_line)

    def install_server(self) -> None:
        """Install the embedded server for its Python."""
        run([str(self.python), "-m", INSTALL_SERVER], lambda line: None)

    def _fingerprint(self) -> str:
        packages = [*self.requirements, *self.alone, *self.where_found]
        made_of = [(ROOT / "pyproject.toml").read_text(), sys.version, sys.base_prefix, *packages]
        return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def run(command: list[str], on_line: Callable[[str], None]) -> None:
    """Run a command, passing on each line of its output.

    Raises
    ------
    StepFailedError
        It failed; the message is what it wrote to standard error.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                on_line(line)
            process.wait()
        except BaseException:
            process.kill()  # or it would go on changing an environment that the next run makes anew
            process.wait()
            raise
        finally:
            process.stdout.close()
        if process.returncode != 0:
            errors.seek(0)
            raise StepFailedError(errors.read().strip() or f"{command[0]} failed with status {process.returncode}")


def server_is_installed() -> bool:
    """Return whether the embedded server for this Python, which is also the environment's, is in its place."""
    sys.path.insert(0, str(ROOT))
    from shm_backend_utils.server.install import Installation, default_folder  # noqa: PLC0415

    return Installation(default_folder()).is_complete


def set_up(environment: Environment) -> None:
    """Do what is still to be done, showing progress."""
    steps: list[tuple[str, Callable[[Progress], None]]] = []
    if not environment.is_made():
        steps += [
            (f"make {environment.folder.name}", lambda progress: environment.create()),
            ("install packages", lambda progress: environment.install_packages(progress.advance_by_pip_line)),
        ]
    if not server_is_installed():
        steps.append(("install the server", lambda progress: environment.install_server()))
    if not steps:
        return
    with Progress([name for name, _ in steps]) as progress:
        for name, step in steps:
            progress.begin(name)
            step(progress)
    environment.stamp()


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Set up the checkout.")
    parser.add_argument("--numpy1", action="store_true", help="make .venv-numpy1 instead: the same with NumPy 1.26")
    arguments = parser.parse_args()
    environment = (
        Environment(".venv-numpy1", ["numpy==1.26.4", BINDINGS_OF_CUDA_12], [OTHER_CLIENT], [])
        if arguments.numpy1
        else Environment(".venv", ["numpy>=2", BINDINGS_OF_CUDA_13], [OTHER_CLIENT], [TORCH, CUPY])
    )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    checkout = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(checkout, fcntl.LOCK_EX)  # scripts may be started side by side; the second waits for the first
    try:
        set_up(environment)
    except (StepFailedError, OSError) as error:
        print(f"scripts/setup failed:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        os.close(checkout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
