"""Run the embedded server in the foreground. Prints one line when every model is ready.

With a GPU driver, or environment variables that ask for GPUs, a line on standard error says which GPUs models see.
"""

from __future__ import annotations

import argparse
import errno
import socket
import sys
from pathlib import Path
from typing import Final, get_args

from ..errors import MachineError
from ..repository.files import is_model_folder
from ..server import RELEASES, Ports, StubNumpy, find_gpus, install
from .common.server import copy_sample_models, temporary_server
from .terminal import Interrupted, port, raise_on_signals

__all__ = ["add_arguments", "run"]

_MODELS: Final = "each is a folder NAME with config.pbtxt and 1/model.py"
_PROTOCOLS: Final = ("grpc", "http", "metrics")
_ASKED_FOR_GPUS: Final = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}


def _serve(model_repository: Path | None, ports: Ports, numpy: StubNumpy, version: str | None) -> int:
    """Serve until the server exits by itself, which is a failure; without a repository, serve the sample models."""
    with temporary_server(
        "serve",
        lambda folder: model_repository or copy_sample_models(folder),
        ports=ports,
        installation=install(version=version),
        numpy=numpy,
    ) as server:
        addresses = f"grpc={server.grpc_url} http={server.http_url} metrics={server.metrics_url}"
        print(f"READY {addresses} log={server.log_file}", flush=True)
        gpus = find_gpus(server.environment)
        if gpus.has_driver or _ASKED_FOR_GPUS & set(server.environment):
            print(gpus.text, file=sys.stderr)
        status = server.wait()
        print(f"{server.log_tail()}\nthe server exited by itself, with status {status}", file=sys.stderr)
        return 1


def _look_at(repository: Path) -> None:
    """Raise MachineError if the folder is missing or a model's own; warn on standard error if it has no models."""
    if not repository.is_dir():
        raise MachineError(f"{repository} is not a folder; expected a folder of models: {_MODELS}")
    if is_model_folder(repository):
        parent = repository.absolute().parent
        raise MachineError(f"{repository} is a model's folder; give its parent folder instead: {parent}")
    if not any(each.is_dir() for each in repository.iterdir()):
        print(f"{repository} has no models; {_MODELS}", file=sys.stderr)


def _check_free(ports: Ports) -> None:
    """Raise MachineError if a port is taken; a server would report it only after it has loaded all models."""
    for protocol in _PROTOCOLS:
        number = getattr(ports, protocol)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as after a server that has just ended
            try:
                probe.bind(("127.0.0.1", number))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise MachineError(
                        f"port {number} is already in use; choose another one with --{protocol}-port"
                    ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="folder of models (default: the sample models; those for GPUs only with a GPU and CuPy)",
    )
    for protocol in _PROTOCOLS:
        parser.add_argument(f"--{protocol}-port", type=port, metavar="N", default=0, help="a free port if not given")
    parser.add_argument(
        "--numpy",
        choices=get_args(StubNumpy),
        default="server",
        help="the NumPy that models import: one that the server was built for, with which every model works (default), "
        "or this environment's own, for packages that need NumPy 2",
    )
    known = ", ".join(f"{release.version} (Triton {release.triton})" for release in RELEASES.values())
    parser.add_argument(
        "--server",
        metavar="VERSION",
        help=f"version of nvidia-pytriton, whose wheel contains the server: {known}; default: the newest",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the program, and return 0; return 1 after an error."""
    try:
        raise_on_signals()
        if arguments.model_repository:
            _look_at(arguments.model_repository)
        ports = Ports(arguments.grpc_port, arguments.http_port, arguments.metrics_port)
        _check_free(ports)
        return _serve(arguments.model_repository, ports, arguments.numpy, arguments.server)
    except (MachineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted:
        return 0
