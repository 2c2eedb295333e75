"""Whether anything grows, by one request and by very many; and what registered names and sealed memory cost."""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import ShmClient
from shm_backend_utils.compat.attach import attach
from shm_backend_utils.memory.pool.options import PoolOptions, RegionName

from ...figures import Figure, in_words
from ...processes import Program, children, resident_bytes
from ..bench import Bench, Medians, sealed_bytes, shared_bytes
from ..ways import RegisteredPair

MIB: Final = 2**20

REGISTERED_BYTES: Final = 2**20
OUTPUT_IN: Final = ("two regions", "one region")


def growth(bench: Bench) -> list[Figure]:
    return [*_by_a_request(bench), *_by_many_requests(bench)]


def _by_a_request(bench: Bench) -> list[Figure]:
    """Make requests of 1 GiB and look at Triton's pools, and at what memory of its own the server has."""
    server = bench.server
    grown: list[int] = []
    with bench.direct_client() as client:
        client.infer("identity", {"INPUT0": np.ones(16, np.float32)}, outputs={"OUTPUT0": 64}).release()
        pools = shared_bytes(server.shm_prefix)
        with client.prepare("identity", {"INPUT0": ((2**30 // 4,), np.float32)}) as call:
            for _ in bench.shown("growth by a request", bench.amounts.rounds):
                before = resident_bytes(server.pid)
                call.infer().release()
                grown.append(resident_bytes(server.pid) - before)
        pools_grown = shared_bytes(server.shm_prefix) - pools
    what = "a request of 1 GiB on the direct path"
    basis = f"{len(grown)} requests"
    median, total = statistics.median(grown), f"the median; {sum(grown) / MIB:+.1f} MiB by {basis}"
    return [
        Figure(f"growth of Triton's pools in /dev/shm by {what}", pools_grown, "bytes", basis, at_most=0),
        Figure(f"growth of the server's memory by {what}", median, "bytes", total, at_most=0),
    ]


def _by_many_requests(bench: Bench) -> list[Figure]:
    """Let a separate process send random requests; compare all processes' memory before and after."""
    requests = bench.amounts.requests
    with ExitStack() as stack:
        client = Program("scripts.tools.bench.random_requests", bench.server.grpc_url, requests)
        stack.callback(client.end)
        if not client.hear():
            raise AssertionError("the client has failed before it was warm; what it wrote says why")
        before = _held(bench, client.pid)
        client.say("go")
        for _ in bench.shown(f"{requests:,} requests at random", 100):
            client.hear()
        outcome = json.loads(client.hear())  # if the process has failed, what it wrote says why
        after = _held(bench, client.pid)
    grown = {who: (after[who] - before[who]) / MIB for who in after}
    basis = ", ".join(f"{who} {mebibytes:+.1f}" for who, mebibytes in grown.items())
    what = f"{requests:,} requests of random shapes, dtypes, parameters, hints and overflows"
    seen = f"{outcome['answers']:,} answers, {outcome['overflowed']:,} of them with overflows"
    return [
        Figure(f"growth after {what}", sum(grown.values()), "MiB more than before", basis, at_most=8.0),
        Figure(f"wrong answers to {what}", outcome["wrong"], "answers", seen, at_most=0),
    ]


def _held(bench: Bench, client_pid: int) -> dict[str, int]:
    """Return each process' own memory, and shared memory, counted once."""
    server = bench.server
    return {
        "client": resident_bytes(client_pid),
        "server": resident_bytes(server.pid),
        "stubs": sum(map(resident_bytes, children(server.pid))),
        "client's regions": shared_bytes(f"shmbu-{client_pid}-") + sealed_bytes(client_pid),
        "Triton's pools": shared_bytes(server.shm_prefix),
    }


def registered(bench: Bench) -> list[Figure]:
    """Measure an identity by :func:`attach`, over both protocols, with both tensors in one region or in two."""
    figures = []
    for protocol in bench.urls:
        medians = _registered_over(bench, protocol)
        for words in sorted(OUTPUT_IN):
            name, unit = f"{protocol}: identity of 1 MiB by attach, {words}, names checked", "× names trusted"
            figures.append(medians.ratio(name, f"checked, {words}", f"trusted, {words}", unit, at_most=1.15))
    return figures


def _registered_over(bench: Bench, protocol: str) -> Medians:
    with ExitStack() as stack:
        client = stack.enter_context(bench.plain_client(protocol))
        pair = RegisteredPair(stack, client, protocol, 2 * REGISTERED_BYTES)
        pair.fill(np.ones(REGISTERED_BYTES // 4, np.float32))
        cases = {}
        for words in OUTPUT_IN:
            for case, model in (("trusted", "trusting_identity"), ("checked", "identity")):
                cases[f"{case}, {words}"] = partial(client.infer, model, **attach(model, pair.inputs, pair.outputs))
            pair.outputs[0].set_shared_memory(pair.source.name, REGISTERED_BYTES, REGISTERED_BYTES)
        return bench.measure(f"registered names, {protocol}", cases)


REGIONS: Final[tuple[RegionName, ...]] = ("system", "sealed")


def sealed(bench: Bench) -> list[Figure]:
    figures: list[Figure] = []
    for protocol, url in bench.urls.items():
        with ExitStack() as stack:
            clients: dict[str, ShmClient] = {}
            for region in REGIONS:
                client = ShmClient(url, path="direct", inline_bytes=0, pool=PoolOptions(region=region))
                clients[region] = stack.enter_context(client)
            for byte_size in (2**12, 2**24):
                figures += _of_size(bench, protocol, byte_size, clients)
    return figures


def _of_size(bench: Bench, protocol: str, byte_size: int, clients: dict[str, ShmClient]) -> list[Figure]:
    what = f"{protocol}: infer of {in_words(byte_size)}"
    x = np.ones(byte_size // 4, np.float32)
    cases = {region: partial(_infer, client, x) for region, client in clients.items()}
    first = bench.measure(
        f"{what}, first",
        cases,
        bench.amounts.slow_rounds,
        warm_up_rounds=3,  # in which it tries the model
        before=lambda region: clients[region]._memory.pool.drop_idle(),
    )
    warm = bench.measure(f"{what}, warm", cases)
    more_ms, unit = first["sealed"] - first["system"], "ms more than in a new region of /dev/shm"
    basis = f"{first['sealed']:.3f} ms - {first['system']:.3f} ms"
    known, in_system = f"{what}, in a sealed region that the model knows", "× in one of /dev/shm"
    return [
        Figure(f"{what}, the first in a new sealed region", more_ms, unit, basis, at_most=3.0),
        warm.ratio(known, "sealed", "system", in_system, at_most=1.05),
    ]


def _infer(client: ShmClient, x: np.ndarray[Any, Any]) -> None:
    client.infer("identity", {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}).release()
