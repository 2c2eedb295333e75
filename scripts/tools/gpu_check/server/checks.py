"""Both levels: models in processes of a harness, and on a real server. All of it needs tritonclient."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import find_gpus
from shm_backend_utils.server.install import install

from ...processes import children, open_files, resident_bytes
from ..gpu import Gpu, used_bytes
from ..kernels import LIBRARIES, Gate
from ..report import Amounts, CheckFailedError, NotOnAFakeError, Report, require
from . import calls, captures, memory, native, order
from .client import ServerClient, TritonClient, harness_clients, triton_clients, wait_until

CHECKS: Final = {**calls.CHECKS, **order.CHECKS, **memory.CHECKS}
ONCE: Final = {
    **captures.CHECKS,
    "client and model share GPU memory in one process": memory.in_one_process,
    "the model is killed after it has answered: the client's stream goes on within a second": order.model_is_killed,
}
"""With one library, and once: it does not matter here whose kernels run."""
_HARNESS: Final = "processes"
_SERVER: Final = "a real server"


class _Usage(NamedTuple):
    device_bytes: int
    descriptors: int  # sockets left out: how many a client has depends on how its calls meet
    host_bytes: int


def check_harness(report: Report, gpus: Sequence[Gpu], gate: Gate, amounts: Amounts) -> None:
    """Run all checks with models in processes of a harness, and measure with the first library."""
    with _started(report, _HARNESS, "models start", lambda: harness_clients(gpus, gate, amounts)) as clients:
        for client in clients:
            of_cupy = calls.OF_CUPY if client.gpu.kernels.name == "cupy" else {}
            _check_twice(report, _HARNESS, client, {**CHECKS, **of_cupy})
            name = "a process that ends with tensors and calls alive ends well"
            report.run(_group(_HARNESS, client), name, partial(memory.alive_at_exit, client))
        for client in clients[:1]:
            for name, measure in calls.MEASURES.items():  # what is measured depends little on the library
                report.measure(_HARNESS, name, partial(measure, client, amounts))
        for client in clients[-1:]:
            for name, check in ONCE.items():
                report.run(_HARNESS, name, partial(check, client))


def check_server(report: Report, gpus: Sequence[Gpu], gate: Gate, amounts: Amounts) -> None:
    """Run all checks with a server, and measure with the first library; or say why not."""

    def start() -> AbstractContextManager[list[TritonClient]]:
        try:
            installation = install()
            installation.check()
        except MachineError as error:
            raise CheckFailedError(f"{error}; --level 1 does without") from None
        return triton_clients(gpus, gate, amounts, installation)

    with _started(report, _SERVER, "a server starts with the models", start) as clients:
        report.learned("server", clients[0].bare.get_server_metadata().version if clients else "none")
        for client in clients[:1]:
            report.run(_SERVER, "its models see the GPU", partial(_models_see, client))
        for client in clients:
            of_cupy = calls.OF_CUPY if client.gpu.kernels.name == "cupy" else {}
            of_the_first = order.CHECKS if client is clients[0] else {}  # level 1 has them with each library
            _check_twice(report, _SERVER, client, {**calls.CHECKS, **of_cupy, **of_the_first, **native.CHECKS})
        for client in clients[:1]:
            for name, measure in {**calls.OF_TRITON, **native.MEASURES}.items():
                report.measure(_SERVER, name, partial(measure, client, amounts))


@contextlib.contextmanager
def _started(report: Report, group: str, name: str, begin: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """Start something as a check of its own, and have its clients for a block; none if it does not start."""
    with contextlib.ExitStack() as stack:
        clients: list[ServerClient] = []
        report.run(group, name, lambda: clients.extend(stack.enter_context(begin())))
        yield clients


def _check_twice(report: Report, level: str, client: Any, checks: Mapping[str, Callable[[Any], str | None]]) -> None:
    """Run checks, and then those again that passed, each time with a client of their own: nothing may have grown."""
    group = _group(level, client)
    with client.renewed() as fresh:
        passed = [name for name, check in checks.items() if report.run(group, name, partial(check, fresh))]

    def again() -> str:
        client.free_unused()
        time.sleep(client.amounts.rest_s)
        before = _usage(client)
        with client.renewed() as fresh:
            for name in passed:
                try:
                    checks[name](fresh)
                except Exception as error:
                    raise CheckFailedError(f"for a second time, {name!r} has failed: {error}") from error
        client.free_unused()
        otherwise = f"it has grown from {before}, at first to {_usage(client)}"
        wait_until(lambda: not _grown(before, _usage(client)), otherwise)
        return str(_usage(client))

    report.run(group, "a second cycle of all this takes no more than the first", again)


def _group(level: str, client: ServerClient) -> str:
    return f"{level}, with {LIBRARIES[client.gpu.kernels.name]}"


def _grown(before: _Usage, now: _Usage) -> bool:
    has_grown = now.device_bytes > before.device_bytes or now.descriptors > before.descriptors
    return has_grown or now.host_bytes > before.host_bytes * 1.02  # by so small a part it may vary


def _usage(client: ServerClient) -> _Usage:
    """Return what this process and all that it has started have in use."""
    processes = [os.getpid()]
    for process in processes:
        processes += children(process)
    files = [file for process in processes for file in open_files(process) if not file.startswith("socket:")]
    return _Usage(used_bytes(client.gpu.runtime), len(files), sum(map(resident_bytes, processes)))


def _models_see(client: TritonClient) -> str:
    finding = find_gpus(client.triton.environment)
    if client.gpu.is_fake:
        raise NotOnAFakeError("the server must not find a fake driver: it would take it for a real one")
    require(finding.is_ready, finding.text)
    return finding.text
