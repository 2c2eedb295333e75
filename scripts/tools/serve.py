"""Run the embedded server in the foreground. Prints one line when every model is ready.

Where there is a driver of GPUs, or the environment names some, a line on standard error says what models see of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from shm_backend_utils.errors import MachineError
from shm_backend_utils.server import Ports, StubNumpy, find_gpus

from .common.command_line import Interrupted, raise_on_signals
from .common.sample_models import copy_sample_models
from .common.server import temporary_server

_ASKED_FOR_GPUS = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}


def serve(model_repository: Path | None, ports: Ports, numpy: StubNumpy) -> int:
    """Serve until the server exits by itself, which is a failure: return a status that says so.

    Without a repository, the sample models are served.
    """
    with temporary_server(
        "serve", lambda folder: model_repository or copy_sample_models(folder), ports=ports, numpy=numpy
    ) as server:
        addresses = f"grpc={server.grpc_url} http={server.http_url} metrics={server.metrics_url}"
        print(f"READY {addresses} log={server.log_file}", flush=True)
        gpus = find_gpus(server.environment)
        if gpus.has_driver or _ASKED_FOR_GPUS & set(server.environment):
            print(gpus.text, file=sys.stderr)
        status = server.wait()
        print(f"{server.log_tail()}\nthe server exited by itself, with status {status}", file=sys.stderr)
        return 1


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/serve", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model-repository",
        type=Path,
        metavar="DIR",
        help="folder of models (default: the sample models; those for GPUs only where a GPU and CuPy are)",
    )
    for protocol in ("grpc", "http", "metrics"):
        parser.add_argument(f"--{protocol}-port", type=int, metavar="N", default=0, help="a free port if not given")
    parser.add_argument(
        "--numpy",
        choices=get_args(StubNumpy),
        default="server",
        help="the models' NumPy: one that the server was built for, with which every model works (default), or this "
        "environment's own, for packages that need NumPy 2",
    )
    arguments = parser.parse_args()
    raise_on_signals()
    try:
        ports = Ports(arguments.grpc_port, arguments.http_port, arguments.metrics_port)
        return serve(arguments.model_repository, ports, arguments.numpy)
    except MachineError as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted:
        return 0


if __name__ == "__main__":
    sys.exit(main())
