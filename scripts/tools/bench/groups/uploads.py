"""How fast arrays get to a model that answers with little, every one of another shape.

Beside tritonclient in band with a stock model that does the same; for one thread and for some, as a service has them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import ShmClient

from ...figures import Figure
from ..bench import Bench
from ..payloads import Upload, in_band, uploads_of
from ..rates import Rates, rate_ratio, rates_of_threads

BYTES: Final = {"50 KB": 50_000, "1 MB": 1_000_000}
LEAST: Final[Mapping[str, float]] = {"50 KB": 1.2, "1 MB": 1.5}
THREADS: Final = {"1 thread": 1, "4 threads": 4}
OURS: Final = "session_row_sums"
STOCK: Final = "stock_row_sums"


def uploads(bench: Bench) -> list[Figure]:
    """Measure the rate of uploads, for both protocols."""
    figures = []
    for size, byte_size in BYTES.items():
        given = uploads_of(byte_size)
        for protocol in bench.urls:
            for who, threads in THREADS.items():
                name = f"{protocol}: uploads of around {size}, {who}, shapes varying"
                rates = _rates(bench, name, protocol, given, threads)
                unit = "× the rate of tritonclient in band with a stock model"
                figures.append(rate_ratio(name, rates, unit, at_least=LEAST[size]))
    return figures


def _rates(bench: Bench, name: str, protocol: str, given: list[Upload], threads: int) -> Rates:
    with ExitStack() as stack:
        client = stack.enter_context(ShmClient(bench.urls[protocol]))
        plain = _PlainClients(bench, protocol, stack)

        def send(upload: Upload) -> None:
            with client.infer(OURS, {"INPUT0": upload.x}) as result:
                _check(result["SUMS"], upload)

        def send_in_band(upload: Upload) -> None:
            answer = plain.client().infer(STOCK, in_band(upload.x, protocol))
            _check(answer.as_numpy("SUMS"), upload)

        cases = {"ours": send, "stock": send_in_band}
        return rates_of_threads(bench, name, cases, given, threads, bench.amounts)


class _PlainClients(threading.local):
    """A client for each thread: over HTTP, tritonclient has one thread use one."""

    def __init__(self, bench: Bench, protocol: str, stack: ExitStack) -> None:  # in every thread
        self._client = bench.plain_client(protocol)
        stack.callback(self._client.close)

    def client(self) -> Any:
        """Return the client of the thread that asks."""
        return self._client


def _check(sums: Any, upload: Upload) -> None:
    if not np.array_equal(sums, upload.sums):
        raise AssertionError("an upload got another one's sums")
