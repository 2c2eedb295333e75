"""Level 2: a real server."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Installation, find_gpus
from shm_backend_utils.server.install import default_folder

from ..gpu import Gpu
from ..report import Amounts, CheckFailedError, NotOnAFakeError, Report, require

if TYPE_CHECKING:
    from shm_backend_utils.server import EmbeddedServer

    from .client import ServerCheck, ServerClient

_GROUP: Final = "a real server"
_WITHOUT: Final = "; --level 1 does without"


def find_server(folder: Path | None) -> Installation:
    """Return the server in a folder, or where this package installs it.

    Raises CheckFailedError: there is none, or it cannot be run here.
    """
    installation = Installation(folder or default_folder())
    if not installation.is_complete:
        where = (
            "in the folder that --server names" if folder else "where this package installs one; --server says where"
        )
        raise CheckFailedError(f"there is no server {where}{_WITHOUT}")
    try:
        installation.check()
    except MachineError as error:
        raise CheckFailedError(f"{error}{_WITHOUT}") from None
    return installation


def check_server(report: Report, gpus: Mapping[str, Gpu], amounts: Amounts, folder: Path | None) -> None:
    """Run all checks of this level, and measure with the first library; or say why not."""
    with check_with_server(report, gpus, folder) as clients:
        for client in clients[:1]:
            _measure(report, client, amounts)


@contextlib.contextmanager
def check_with_server(report: Report, gpus: Mapping[str, Gpu], folder: Path | None) -> Iterator[list[ServerClient]]:
    """Run all checks, and return a client with each library, for the block; none if there is no server."""
    with contextlib.ExitStack() as stack:
        clients: list[ServerClient] = []
        servers: list[EmbeddedServer] = []

        def start() -> str:
            require(bool(gpus), "no library that was asked for can be used")
            installation = find_server(folder)
            try:
                from .client import clients_of, running_server  # noqa: PLC0415  # needs tritonclient
            except ImportError as error:
                raise CheckFailedError(f"the client needs tritonclient: {error}{_WITHOUT}") from None
            servers.append(stack.enter_context(running_server(list(gpus.values()), installation)))
            clients.extend(stack.enter_context(clients_of(servers[0], list(gpus.values()))))
            return ""

        report.run(_GROUP, "a server starts with the models", start)
        report.learned("server", clients[0].server_version() if clients else "none")
        for client in clients[:1]:
            see = functools.partial(_models_see, servers[0], client.gpu)
            report.run(_GROUP, "its models see the GPU", see)
        for client in clients:
            _check(report, client)
        yield clients


def _models_see(server: EmbeddedServer, gpu: Gpu) -> str:
    finding = find_gpus(server.environment)
    if gpu.is_fake:
        raise NotOnAFakeError("the server must not find a fake driver: it would take it for a real one")
    require(finding.is_ready, finding.text)
    return finding.text


def checks_of(gpu: Gpu) -> dict[str, ServerCheck]:
    """Return all checks that there are with the library."""
    from . import calls, native  # noqa: PLC0415  # need tritonclient

    of_cupy = calls.OF_CUPY if gpu.kernels.name == "cupy" else {}
    return {**calls.CHECKS, **of_cupy, **native.CHECKS, **native.OF_SHM_UTIL}


def _check(report: Report, client: ServerClient) -> None:
    group = f"{_GROUP}, with {client.gpu.kernels.in_words}"
    for name, check in checks_of(client.gpu).items():
        report.run(group, name, functools.partial(check, client))


def _measure(report: Report, client: ServerClient, amounts: Amounts) -> None:
    from . import calls, native  # noqa: PLC0415  # need tritonclient

    for name, measure in (
        ("identity on a GPU, by size", calls.measure_identity),
        ("a kernel and its parts", calls.measure_kernel),
        ("identity on Triton's own path, by size", native.measure_identity),
    ):
        report.run(_GROUP, name, functools.partial(measure, report, _GROUP, client, amounts))
