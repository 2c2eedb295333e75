"""Run the embedded server in the foreground. Prints one line when every model is ready.

Where there is a driver of GPUs, or the environment names some, a line on standard error says what models see of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, get_args

from ..errors import MachineError
from ..server import RELEASES, Ports, StubNumpy, find_gpus, install
from .common.command_line import port
from .common.sample_models import copy_sample_models
from .common.server import temporary_server
from .signals import Interrupted, raise_on_signals

__all__ = ["add_arguments", "run"]

_ASKED_FOR_GPUS: Final = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}


def _serve(model_repository: Path | None, ports: Ports, numpy: StubNumpy, version: str | None) -> int:
    """Serve until the server exits by itself, which is a failure: return a status that says so.

    Without a repository, the sample models are served.
    """
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
    """Raise MachineError where a folder is a model's own; say on standard error if it has no model.

    A server says of the one that a folder has a strange name, and nothing of the other.
    """
    if not repository.is_dir():
        return  # which the server says
    folders = [each for each in repository.iterdir() if each.is_dir()]
    is_model = any(each.name.isdecimal() and (each / "model.py").exists() for each in folders)
    if is_model or (repository / "config.pbtxt").exists():
        parent = repository.absolute().parent
        raise MachineError(f"{repository} is a model's folder; give the one that it lies in: {parent}")
    if not folders:
        print(f"{repository} has no models; each is a folder NAME with config.pbtxt and 1/model.py", file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what may be asked for."""
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="folder of models (default: the sample models; those for GPUs only where a GPU and CuPy are)",
    )
    for protocol in ("grpc", "http", "metrics"):
        parser.add_argument(f"--{protocol}-port", type=port, metavar="N", default=0, help="a free port if not given")
    parser.add_argument(
        "--numpy",
        choices=get_args(StubNumpy),
        default="server",
        help="the models' NumPy: one that the server was built for, with which every model works (default), or this "
        "environment's own, for packages that need NumPy 2",
    )
    known = ", ".join(f"{release.version} (Triton {release.triton})" for release in RELEASES.values())
    parser.add_argument(
        "--server",
        metavar="VERSION",
        help=f"of nvidia-pytriton, whose wheel carries the server: {known}; default: the newest",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the program, which is as it should be: return 0 then."""
    try:
        raise_on_signals()
        if arguments.model_repository:
            _look_at(arguments.model_repository)
        ports = Ports(arguments.grpc_port, arguments.http_port, arguments.metrics_port)
        return _serve(arguments.model_repository, ports, arguments.numpy, arguments.server)
    except (MachineError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted:
        return 0
