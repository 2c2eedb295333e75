"""Calls to a real server on the direct path, with tensors on a GPU: that they are right, and what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import PreparedCall

from .. import photographs
from ..measuring import Amounts, identity_figures, medians_ms, multiply_figure, name_of
from ..report import Report, require
from .client import ServerCheck, ServerClient

__all__ = ["CHECKS", "measure"]

COUNT: Final = 2**19
DEVICE: Final = "cuda:0"


def _numbers() -> npt.NDArray[np.float32]:
    return np.arange(COUNT, dtype=np.float32)


def _there_and_back(client: ServerClient) -> str:
    numbers = _numbers()
    wanted = {"OUTPUT0": (numbers.shape, np.float32, DEVICE)}
    with client.shm.infer("gpu_multiply", {"INPUT0": client.gpu.array(numbers)}, outputs=wanted) as result:
        require(result.path == "direct", f"the call took the path {result.path}; client.explain() says why")
        require(bool((client.gpu.download(result["OUTPUT0"]) == numbers * 2).all()), "the output is wrong")
    return ""


def _in_place(client: ServerClient) -> str:
    gpu, numbers = client.gpu, _numbers()
    with _prepared(client, "gpu_multiply", COUNT) as call:
        for turn in range(3):
            x: Any = call.inputs["INPUT0"]
            gpu.upload(x, numbers + turn)
            with call.infer() as result:
                y: Any = result["OUTPUT0"]
                ours = gpu.runtime.extent(gpu.runtime.address_of(x))
                require(gpu.runtime.extent(gpu.runtime.address_of(y)) == ours, "the output lies in other memory")
                require(bool((gpu.download(y) == (numbers + turn) * 2).all()), f"it is wrong in turn {turn}")
    return ""


def _passed_through(client: ServerClient) -> str:
    with _prepared(client, "gpu_identity", COUNT) as call, call.infer() as result:
        runtime = client.gpu.runtime
        same = runtime.address_of(call.inputs["INPUT0"]) == runtime.address_of(result["OUTPUT0"])
        require(same, "the output is not where the input is")
    return ""


def _from_the_host(client: ServerClient) -> str:
    numbers = _numbers()
    with client.shm.infer("gpu_multiply", {"INPUT0": numbers}, outputs={"OUTPUT0": numbers.nbytes}) as result:
        require(result.path == "direct", f"the call took the path {result.path}")
        require(bool((result["OUTPUT0"] == numbers * 2).all()), "the output is wrong")
    return ""


def _normalize(client: ServerClient) -> str:
    images = client.gpu.array(photographs.noise())
    shape = photographs.COUNT, 3, photographs.HEIGHT, photographs.WIDTH
    wanted = {"NORMALIZED": (shape, np.float32, DEVICE)}
    with client.shm.infer("gpu_normalize", {"IMAGES": images}, outputs=wanted) as result:
        return photographs.compared(client.gpu.download(result["NORMALIZED"]))


CHECKS: Final[Mapping[str, ServerCheck]] = {
    "an array on a GPU goes to gpu_multiply and comes back there": _there_and_back,
    "a prepared call is filled, and answered, in one allocation": _in_place,
    "an input that is passed on stays where it is": _passed_through,
    "gpu_multiply serves the host, too": _from_the_host,
    "gpu_normalize gives what NumPy gives": _normalize,
}


def measure(report: Report, group: str, client: ServerClient, amounts: Amounts) -> None:
    """Measure what calls cost, next to an empty request."""
    report.run(group, "identity on a GPU, by size", lambda: _measure_identity(report, group, client, amounts))
    report.run(group, "gpu_multiply and its parts", lambda: _measure_multiply(report, group, client, amounts))


def _measure_identity(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    with ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": client.infer_nothing}
        for size in amounts.identity_bytes:
            cases[name_of(size)] = stack.enter_context(_prepared(client, "gpu_identity", size // 4)).infer
        medians = medians_ms(cases, amounts.rounds)
    return report.measured(
        *identity_figures(group, "identity", medians, amounts.identity_bytes, is_held=True, binds=True)
    )


def _measure_multiply(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    gpu, count = client.gpu, amounts.large_bytes // 4
    with _prepared(client, "gpu_multiply", count) as call:
        x: Any = call.inputs["INPUT0"]
        gpu.upload(x, np.ones(count, np.float32))
        y: Any = call.infer()["OUTPUT0"]

        def kernel_alone() -> None:
            gpu.double(x, y)
            gpu.wait()

        cases: dict[str, Callable[[], object]] = {
            "empty": client.infer_nothing,
            "kernel": kernel_alone,
            "multiply": call.infer,
        }
        medians = medians_ms(cases, amounts.rounds)
    return report.measured(multiply_figure(group, medians, amounts.large_bytes, binds=True))


def _prepared(client: ServerClient, model: str, count: int) -> contextlib.AbstractContextManager[PreparedCall]:
    place = (count,), np.float32, DEVICE
    return client.shm.prepare(model, {"INPUT0": place}, outputs={"OUTPUT0": place})
