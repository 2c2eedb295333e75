"""Level 2: a real server, if there is one."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation
from shm_backend_utils.server.install import default_folder

from ..gpu import Gpu
from ..measuring import Amounts
from ..report import CheckFailedError, Report, SkippedError

if TYPE_CHECKING:
    from .client import ServerClient

__all__ = ["check_server", "find_server"]

_GROUP: Final = "a real server"


def find_server(folder: Path | None) -> Installation:
    """Return the server in a folder, or where this package installs it.

    Raises
    ------
    SkippedError
        There is none, or it cannot be run here.
    CheckFailedError
        There is none in the folder that was named.
    """
    installation = Installation(folder or default_folder())
    if not installation.is_complete:
        if folder is not None:
            raise CheckFailedError("there is no server in the folder that --server names")
        raise SkippedError("no server is installed; --server says where one is")
    try:
        installation.environment()
    except MachineError as error:
        raise SkippedError(str(error)) from None
    return installation


def check_server(report: Report, gpu: Gpu, amounts: Amounts, folder: Path | None) -> None:
    """Run all checks of this level, and measure; or say why not."""
    with contextlib.ExitStack() as stack:
        started: list[ServerClient] = []

        def start() -> str:
            installation = find_server(folder)
            try:
                from .client import running_server  # noqa: PLC0415  # needs tritonclient
            except ImportError as error:
                raise SkippedError(f"the client needs tritonclient: {error}") from None
            started.append(stack.enter_context(running_server(gpu, installation)))
            return ""

        report.run(_GROUP, "a server starts with the models", start)
        report.learned("server", started[0].server_version() if started else "none")
        for client in started:
            _check(report, client, amounts)


def _check(report: Report, client: ServerClient, amounts: Amounts) -> None:
    from . import calls, native, shm_util  # noqa: PLC0415  # need tritonclient

    checks = {**calls.CHECKS, **native.CHECKS, **shm_util.CHECKS}
    for name, check in checks.items():
        report.run(_GROUP, name, functools.partial(check, client))
    for measured in (calls, native):
        measured.measure(report, _GROUP, client, amounts)
