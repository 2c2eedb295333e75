"""A server in a container of a pod. Tells its addresses, and stops when its standard input ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shm_backend_utils.server import EmbeddedServer


def main(models: Path, log_file: Path) -> None:
    with EmbeddedServer.start(models, log_file=log_file) as server:
        print(json.dumps({"grpc": server.grpc_url, "http": f"http://{server.http_url}"}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
