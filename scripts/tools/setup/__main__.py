"""Make an environment with what the tools need, and install the embedded server. Standard library only.

Says nothing when there is nothing to do. An environment counts as made when its stamp says so, which is written last:
whatever was interrupted or failed is started over.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys

from .. import ROOT
from .environment import (
    COMMANDS,
    EVERYTHING,
    EVERYTHING_WITH_NUMPY_1,
    Contents,
    Environment,
    StepFailedError,
    Subprocess,
)

INSTALL_SERVER = "scripts.tools.setup.install_server"


def server_is_installed() -> bool:
    """Return whether the embedded server for this Python, which is also the environment's, is in its place."""
    sys.path.insert(0, str(ROOT))
    from shm_backend_utils.errors import MachineError  # noqa: PLC0415
    from shm_backend_utils.server.install import default_folder  # noqa: PLC0415
    from shm_backend_utils.server.installation import Installation  # noqa: PLC0415

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
    with Subprocess([str(environment.python), "-m", INSTALL_SERVER]) as installing_server:
        if not is_made:
            _say("install packages")
            environment.install(contents)
            environment.stamp(contents)
        if not is_served:
            _say("install the server")
        installing_server.finish()


def _say(step: str) -> None:
    print(f"scripts/setup: {step}", file=sys.stderr, flush=True)


def end(number: int, _: object) -> None:
    """End by a signal. A second one, as of a group that gets it too, must not end what ends in good order."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Set up the checkout.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--commands",
        action="store_const",
        dest="chosen",
        const=COMMANDS,
        help="have in .venv what scripts/demo and serve need, and not what tests need",
    )
    kinds.add_argument(
        "--numpy1",
        action="store_const",
        dest="chosen",
        const=EVERYTHING_WITH_NUMPY_1,
        help="make .venv-numpy1 instead: the same with NumPy 1.26",
    )
    parser.add_argument("--python", metavar="VERSION", help="make .venv-pyVERSION instead: the same with that Python")
    parser.set_defaults(chosen=EVERYTHING)
    arguments = parser.parse_args()
    contents = arguments.chosen
    name = ".venv" if arguments.python is None else f".venv-py{arguments.python}"  # scripts/setup has found that Python
    if contents is EVERYTHING_WITH_NUMPY_1:
        name += "-numpy1"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start in the background ignore it
    signal.signal(signal.SIGTERM, end)
    checkout = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(checkout, fcntl.LOCK_EX)  # scripts may be started side by side; the second waits for the first
    try:
        set_up(Environment(name), contents)
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
