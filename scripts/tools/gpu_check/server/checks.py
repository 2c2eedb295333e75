"""Level 2: a real server. All of it needs tritonclient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation, find_gpus
from shm_backend_utils.server.install import FOLDER_VARIABLE, default_folder

from ..gpu import Gpu
from ..kernels import LIBRARIES
from ..report import Amounts, CheckFailedError, NotOnAFakeError, Report, require
from . import calls, native
from .client import ServerClient, clients_of

_GROUP: Final = "a real server"
_WITHOUT: Final = "; --level 1 does without"


def check_server(report: Report, gpus: Sequence[Gpu], amounts: Amounts) -> None:
    """Run all checks of this level with each library, and measure with the first; or say why not."""
    with contextlib.ExitStack() as stack:
        clients: list[ServerClient] = []

        def start() -> None:
            require(bool(gpus), "no library that was asked for can be used")
            clients.extend(stack.enter_context(clients_of(gpus, _find_server())))

        report.run(_GROUP, "a server starts with the models", start)
        report.learned("server", clients[0].bare.get_server_metadata().version if clients else "none")
        if clients:
            report.run(_GROUP, "its models see the GPU", partial(_models_see, clients[0]))
            _check(report, clients, amounts)


def _check(report: Report, clients: Sequence[ServerClient], amounts: Amounts) -> None:
    for client in clients:
        library = client.gpu.kernels.name
        of_cupy = calls.OF_CUPY if library == "cupy" else {}
        for name, check in {**calls.CHECKS, **of_cupy, **native.CHECKS}.items():
            report.run(f"{_GROUP}, with {LIBRARIES[library]}", name, partial(check, client))
    for name, measure in {**calls.MEASURES, **native.MEASURES}.items():
        report.measure(_GROUP, name, partial(measure, clients[0], amounts))


def _find_server() -> Installation:
    """Return the installed server; CheckFailedError if there is none, or it cannot be run here."""
    installation = Installation(default_folder())
    where = f"there is no server where this package installs one; {FOLDER_VARIABLE} says where{_WITHOUT}"
    require(installation.is_complete, where)
    try:
        installation.check()
    except MachineError as error:
        raise CheckFailedError(f"{error}{_WITHOUT}") from None
    return installation


def _models_see(client: ServerClient) -> str:
    finding = find_gpus(client.server.environment)
    if client.gpu.is_fake:
        raise NotOnAFakeError("the server must not find a fake driver: it would take it for a real one")
    require(finding.is_ready, finding.text)
    return finding.text
