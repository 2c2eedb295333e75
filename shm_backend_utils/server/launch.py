"""Launch a tritonserver on free loopback ports, wait until every model is ready, and stop it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ..errors import CallerError, ClosedError, MachineError
from .install import has_numpy_1, install, install_numpy, make_environment, reads_own_numpy
from .installation import Installation
from .preflight import find_gpus

__all__ = ["EmbeddedServer", "Ports", "StubNumpy"]

StubNumpy = Literal["server", "own"]
"""Which NumPy the models of a server have: one that its stub was built for, or that of this interpreter."""

_LOG: Final = logging.getLogger(__name__)
_HOST: Final = "127.0.0.1"
_PORTS: Final = range(10_000, 30_000)  # below ephemeral ones: a client that dials one of those may connect to itself
_LOG_LIMIT: Final = 4 * 1024 * 1024
_POLL_S: Final = 0.05
_STOP_S: Final = 60.0
_ATTEMPTS: Final = 3
_ERROR_LINE: Final = re.compile(r'E\d{4} \S+ \d+ \S+\] "?(.*?)"?$')
_ESCAPED: Final = re.compile(r'\\([n"\\])')  # the log has messages as JSON has strings
_ABOUT_GPUS: Final = re.compile("GPU|CUDA|cuda")
_DEAD_STUB: Final = re.compile(r"I\d{4} \S+ \d+ pb_stub\.cc:\d+\] *(Failed to preinitialize Python stub: .*)")
_TELLING: Final = ("failed to load", "failed to start", "Poll failed", "in use")
_EXIT_TIMEOUT_S: Final = 5  # not 30: the server waits so long for a dead model process, or a request that never ends
_REFUSES_CLIENT_SHM: Final = "2.68"  # by default, from this version on; older ones exit on the unknown flag
# Every region of the Python backend has this prefix by default, and servers refuse to register keys that begin with it.
_BACKEND_SHM_PREFIX: Final = "triton_python_backend_shm_region_"


class Ports(NamedTuple):
    """TCP ports on the loopback interface; 0 is any free one."""

    grpc: int = 0
    http: int = 0
    metrics: int = 0

    def resolve(self) -> Ports:
        """Return the ports with every 0 replaced by a port that is free now."""
        with contextlib.ExitStack() as sockets:
            return Ports(*[port or _free_port(sockets) for port in self])


class EmbeddedServer:
    """A running tritonserver, made by :meth:`start`. A context manager; it ends with this process at the latest.

    Attributes
    ----------
    grpc_url, http_url, metrics_url : str
        ``HOST:PORT``.
    log_file : pathlib.Path
        The server's output: its last 4 MiB at most; the 4 MiB before are in ``FILE.1``.
    shm_prefix : str
        The prefix of its Python backend's shared memory.
    environment : dict
        The environment variables of the server, and so of its stubs.
    """

    def __init__(
        self,
        installation: Installation,
        environment: dict[str, str],
        model_repository: Path,
        ports: Ports,
        log_file: Path,
    ) -> None:
        self.environment = environment
        self.grpc_url = f"{_HOST}:{ports.grpc}"
        self.http_url = f"{_HOST}:{ports.http}"
        self.metrics_url = f"{_HOST}:{ports.metrics}"
        self.log_file = log_file
        self.shm_prefix = f"{_BACKEND_SHM_PREFIX}{secrets.token_hex(6)}_"
        command = [
            *[str(log_file), str(_LOG_LIMIT), self.shm_prefix, str(installation.binary)],
            f"--model-repository={os.path.realpath(model_repository)}",  # Path.resolve raises where links go in circles
            f"--backend-directory={installation.backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--grpc-address={_HOST}",
            f"--http-address={_HOST}",
            f"--metrics-address={_HOST}",
            f"--grpc-port={ports.grpc}",
            f"--http-port={ports.http}",
            f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        ]
        if installation.is_at_least(_REFUSES_CLIENT_SHM):
            command.append("--allow-client-shm=true")
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_bytes(b"")
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.supervisor", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the launcher's to handle
        )

    @classmethod
    def start(
        cls,
        model_repository: Path,
        *,
        ports: Ports | None = None,
        installation: Installation | None = None,
        log_file: Path | None = None,
        timeout_s: float = 120.0,
        numpy: StubNumpy = "server",
    ) -> EmbeddedServer:
        """Start a server and return when all of its models are ready.

        Parameters
        ----------
        model_repository : pathlib.Path
            Folder of models.
        ports : Ports, optional
            Free ones if not given.
        installation : Installation, optional
            If not given, :func:`.install` provides it.
        log_file : pathlib.Path, optional
            If not given, a temporary file, which is removed when this process ends.
        timeout_s : float
            How long the start may take.
        numpy : str
            The NumPy that models import. ``"server"``: one that the server's stub can read, so every model works.
            Before Triton 2.52 that is NumPy 1.26, beside all other packages of this interpreter. ``"own"``: this
            interpreter's, for models whose packages need NumPy 2; before 2.52, numbers then work only in models with a
            ``ShmSession``, and strings only on the direct path. From 2.52 on, both are the same. Python 3.13 has no
            NumPy 1: there, ``"server"`` means ``"own"``, with a warning before 2.52.

        Returns
        -------
        EmbeddedServer
            Running; stop it with :meth:`stop`, or use it as a context manager.

        Raises
        ------
        MachineError
            The server did not start, or a model did not load; the message has the reason from the log.
        """
        if numpy not in ("server", "own"):
            raise CallerError(f"numpy is {numpy!r}; expected 'server' or 'own'")
        installation = installation or install()
        environment = installation.environment(_python_environment(installation) if numpy == "server" else None)
        log_file = log_file or _temporary_folder() / "server.log"
        wanted = ports or Ports()
        attempts = _ATTEMPTS if 0 in wanted else 1
        _LOG.info("loading the models; the server's log is %s", log_file)
        while True:
            server = cls(installation, environment, model_repository, wanted.resolve(), log_file)
            attempts -= 1
            try:
                server._wait_until_ready(timeout_s)
            except BaseException as error:
                server.stop()
                if not attempts or "already in use" not in str(error):  # lost the race for a port
                    raise
            else:
                return server

    @property
    def pid(self) -> int:
        """Process id of the tritonserver; raises ClosedError when it has exited."""
        supervisor = self._supervisor.pid
        if self.is_running:
            with contextlib.suppress(FileNotFoundError, IndexError):  # the supervisor ends a moment after the server
                return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
        raise ClosedError("this server")

    @property
    def is_running(self) -> bool:
        """Whether the server has not exited."""
        return self._supervisor.poll() is None

    def is_ready(self) -> bool:
        """Return whether all models and services are ready; the server starts the metrics last.

        From Triton 26.04 on, a model is not ready if its process is dead, or if its own ``is_ready`` says so.
        """
        return all(_answers(url) for url in (f"{self.http_url}/v2/health/ready", f"{self.metrics_url}/metrics"))

    def stop(self) -> None:
        """Stop the server and all processes that it started, and return when they are gone. You can call it again."""
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def wait(self) -> int:
        """Wait until the server exits by itself and return its exit status."""
        return self._supervisor.wait()

    def log_tail(self, line_count: int = 30) -> str:
        """Return the last lines of the server's log, ``line_count`` at most."""
        return "\n".join(self._log().splitlines()[-line_count:])

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        return f"<EmbeddedServer grpc={self.grpc_url} http={self.http_url} {state}>"

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not self.is_running or _DEAD_STUB.search(self._log()):  # the server waits for such a process for ever
                raise MachineError(f"tritonserver did not start: {self._failure()}")
            if time.monotonic() > deadline:
                raise MachineError(f"tritonserver was not ready after {timeout_s:g} s: {self._failure()}")
            time.sleep(_POLL_S)

    def _log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _failure(self) -> str:
        reasons = list(dict.fromkeys(_reasons(self._log())))
        if any(_ABOUT_GPUS.search(reason) for reason in reasons):
            reasons.append(find_gpus(self.environment).text)
        return "\n".join(reasons) or self.log_tail()


def _reasons(log: str) -> Iterator[str]:
    """Yield the causes of a failure from a server's log: the lines on models first, then the last lines."""
    lines = log.splitlines()
    for line in lines:
        error = _ERROR_LINE.match(line)
        if error and any(words in error[1] for words in _TELLING):
            yield _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], error[1])
        elif line.startswith("[libprotobuf ERROR"):
            yield line.partition("] ")[2]
        elif dead := _DEAD_STUB.match(line):
            yield dead[1]
    for line in lines:
        if line.startswith(("error:", "The server cannot")) or "unrecognized option" in line:
            yield line


def _answers(url: str) -> bool:
    without_proxy = urllib.request.ProxyHandler({})  # it is on this machine, whatever http_proxy says
    direct = urllib.request.build_opener(without_proxy)
    try:
        with direct.open(f"http://{url}", timeout=5) as reply:
            return int(reply.status) == 200
    except (OSError, HTTPException):  # the latter from a port with another protocol
        return False


def _python_environment(installation: Installation) -> Path | None:
    """Return an environment with a NumPy that the stub reads; None if this process has one, or none is available."""
    if reads_own_numpy(installation):
        return None
    if not has_numpy_1():
        _LOG.warning(
            "the server's stub needs NumPy 1, which does not exist for this Python: with NumPy %s, models without a "
            "ShmSession read arrays that repeat the first element, and outputs are empty; use Python 3.12 or older",
            metadata.version("numpy"),
        )
        return None
    folder = _temporary_folder() / "environment"
    make_environment(folder, install_numpy(installation.numpy))
    return folder


def _temporary_folder() -> Path:
    """Return a folder that lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="tritonserver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _free_port(sockets: contextlib.ExitStack) -> int:
    """Return a port that stays free while the sockets are open, and that no outgoing connection will be given."""
    probe = sockets.enter_context(socket.socket())
    while True:
        port = secrets.choice(_PORTS)  # not random: other processes may have seeded it alike
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
