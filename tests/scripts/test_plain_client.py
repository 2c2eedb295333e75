"""``scripts/plain_client``, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.tools import ROOT, plain_client
from shm_backend_utils.server import EmbeddedServer


def run(*arguments: str) -> tuple[int, str, str]:
    """Run it to its end, after which nothing of it is in shared memory; return exit status and both outputs."""
    with subprocess.Popen(
        [sys.executable, "-m", plain_client.__name__, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, error = process.communicate()
    assert list(Path("/dev/shm").glob(f"plain-client-{process.pid}*")) == []
    return process.returncode, out, error


def test_the_tensors_stay_in_its_region(triton_server: EmbeddedServer) -> None:
    status, out, error = run("--url", triton_server.grpc_url, "--batch", "2")
    assert (status, error) == (0, "")
    summary = json.loads(out)
    assert summary.pop("request_bytes") < 400
    assert summary == {"correct": True, "tensor_bytes": 2 * 2 * 3 * 224 * 224 * 4, "reply_tensors": 0}


def test_it_leaves_nothing_when_the_request_fails_or_there_is_no_server(triton_server: EmbeddedServer) -> None:
    status, _, error = run("--url", triton_server.grpc_url, "--batch", "17")  # multiply takes 16
    assert (status, "batch-size must be <= 16" in error) == (1, True)
    status, out, error = run("--url", "127.0.0.1:1")
    assert (status, out, error[:45], error.count("\n")) == (1, "", "[StatusCode.UNAVAILABLE] failed to connect to", 1)
