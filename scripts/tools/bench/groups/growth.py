"""Whether anything grows: by a request on the direct path, and after very many requests that are all different."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any, Final

import numpy as np

from ...figures import Figure
from ..bench import Bench
from ..machine import resident_bytes, sealed_bytes, shared_bytes
from ..server import stubs_of

PROGRAM: Final = "scripts.tools.bench.random_requests"
LARGE_BYTES: Final = 2**30
MOST_GROWN_MIB: Final = 8.0
MIB: Final = 2**20


def growth(bench: Bench) -> list[Figure]:
    """Measure both."""
    return [*_by_a_request(bench), *_by_many_requests(bench)]


def _by_a_request(bench: Bench) -> list[Figure]:
    """Make requests of 1 GiB and look at Triton's pools, and at what memory of its own the server has."""
    server = bench.server
    grown: list[int] = []
    with bench.direct_client() as client:
        client.infer("identity", {"INPUT0": np.ones(16, np.float32)}, outputs={"OUTPUT0": 64}).release()
        pools = shared_bytes(server.shm_prefix)
        with client.prepare("identity", {"INPUT0": ((LARGE_BYTES // 4,), np.float32)}) as call:
            for _ in bench.shown("growth by a request", bench.amounts.rounds):
                before = resident_bytes(server.pid)
                call.infer().release()
                grown.append(resident_bytes(server.pid) - before)
        pools_grown = shared_bytes(server.shm_prefix) - pools
    what = "a request of 1 GiB on the direct path"
    basis = f"{len(grown)} requests"
    return [
        Figure(f"growth of Triton's pools in /dev/shm by {what}", pools_grown, "bytes", basis, at_most=0),
        Figure(
            f"growth of the server's memory by {what}",
            statistics.median(grown),
            "bytes",
            f"the median; {sum(grown) / MIB:+.1f} MiB by {basis}",
            at_most=0,
        ),
    ]


def _by_many_requests(bench: Bench) -> list[Figure]:
    """Have a process of its own send requests at random; look at everybody's memory before and after."""
    requests = bench.amounts.requests
    command = [sys.executable, "-m", PROGRAM, bench.server.grpc_url, "--requests", str(requests)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        _line(client.stdout)  # it has warmed up
        before = _held(bench, client.pid)
        client.stdin.write("go\n")
        client.stdin.flush()
        for _ in bench.shown(f"{requests:,} requests at random", 100):
            _line(client.stdout)
        outcome = json.loads(_line(client.stdout))
        after = _held(bench, client.pid)
    grown = {who: (after[who] - before[who]) / MIB for who in after}
    basis = ", ".join(f"{who} {mebibytes:+.1f}" for who, mebibytes in grown.items())
    what = f"{requests:,} requests of random shapes, dtypes, parameters, hints and overflows"
    seen = f"{outcome['answers']:,} answers, {outcome['overflowed']:,} of them with overflows"
    return [
        Figure(f"growth after {what}", sum(grown.values()), "MiB more than before", basis, at_most=MOST_GROWN_MIB),
        Figure(f"wrong answers to {what}", outcome["wrong"], "answers", seen, at_most=0),
    ]


def _line(stream: Any) -> str:
    line: str = stream.readline()
    if not line:
        raise AssertionError("the process with the requests at random has failed; what it wrote says why")
    return line


def _held(bench: Bench, client_pid: int) -> dict[str, int]:
    """Return what everybody has of memory of their own, and what lies in shared memory, counted once."""
    server = bench.server
    return {
        "client": resident_bytes(client_pid),
        "server": resident_bytes(server.pid),
        "stubs": sum(map(resident_bytes, stubs_of(server))),
        "client's regions": shared_bytes(f"shmbu-{client_pid}-") + sealed_bytes(client_pid),
        "Triton's pools": shared_bytes(server.shm_prefix),
    }
