"""What a metrics port says, as Triton 2.51 writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.answering_server import answering

__all__ = ["TRITONS_OWN", "MetricsServer", "calls", "metrics_server", "series"]

TRITONS_OWN = """# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="multiply",version="1"} 3
# HELP nv_cpu_utilization CPU utilization rate [0.0 - 1.0]
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.98
"""


def series(
    name: str,
    value: float | str,
    *,
    model: str = "multiply",
    session: str = "1-a",
    kind: str = "counter",
    own: str = "",
) -> str:
    """Return one series with its type."""
    labels = f'model="{model}",{own}session="{session}",version="1"'
    name = f"shm_backend_utils_{name}"
    return f"# TYPE {name} {kind}\n{name}{{{labels}}} {value}\n"


def calls(path: str, count: float, *, model: str = "multiply", session: str = "1-a") -> str:
    """Return the counter of answered requests."""
    return series("calls_total", count, model=model, session=session, own=f'path="{path}",')


class MetricsServer:
    """A metrics port that a test writes the answers of.

    Attributes
    ----------
    text : str
        What it says when it is asked for metrics.
    url : str
    """

    def __init__(self) -> None:
        self.text = TRITONS_OWN
        self.url = ""


@contextmanager
def metrics_server(port: int = 0) -> Iterator[MetricsServer]:
    """Answer on a port until the block ends."""

    def answer(path: str) -> tuple[int, bytes]:
        return (200 if path == "/metrics" else 404), said.text.encode(errors="surrogateescape")

    said = MetricsServer()
    with answering(answer, port) as said.url:
        yield said
