"""Checks that graph captures of other threads survive all that the library does, but for what must refuse."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from shm_backend_utils.client import ShmError

from ..kernels import CAPTURE_MODES, Capture
from ..report import raised, require
from .client import NUMBERS, Check, ServerClient


def _survives_in_client(client: ServerClient, mode: str) -> None:
    """A named call, a prepared one, arrays that are dropped, and a client that is closed, beside a capture."""
    gpu = client.gpu
    stream, doomed, tensor = gpu.kernels.stream(0), client.another(), client.filled()
    dropped = [client.infer(tensor, cuda_stream=stream)["OUTPUT0"] for _ in range(2)]
    outputs = {"OUTPUT0": (NUMBERS.shape, NUMBERS.dtype, "cuda:0")}
    doomed.infer(client.model("work"), {"INPUT0": tensor}, outputs=outputs, cuda_stream=stream).release()
    with client.prepared() as call:
        gpu.upload(gpu.described(call.inputs["INPUT0"]), NUMBERS)
        capture = Capture(gpu.runtime, mode)
        try:
            call.inputs_ready(stream)
            prepared, lent = call.infer(), client.infer(tensor, cuda_stream=stream)
            dropped.clear()
            doomed.close()
            client.free_unused()
        finally:
            error = capture.end()
        require(not error, f"the capture ended with {error}")
        for result in (prepared, lent):
            client.require_quick(result)


def _survives_in_model(client: ServerClient, mode: str) -> None:
    """The model's process captures, from one request to the end of the next; the request after it fails if it died."""
    tensor, stream = client.filled(), client.gpu.kernels.stream(0)
    for parameters in ({"capture": mode}, {}):
        client.require_quick(client.infer(tensor, cuda_stream=stream, parameters=parameters))


def _unnamed_refused_in_client(client: ServerClient) -> str:
    tensor = client.filled()
    capture = Capture(client.gpu.runtime, "GLOBAL", is_blocking=True)
    try:
        refusal = raised(ShmError, "a call that waits for the whole GPU was not refused", client.infer, tensor)
    finally:
        error = capture.end()
    require(not error, f"the capture ended with {error}")
    client.require_quick(client.infer(tensor))
    return str(refusal)


def _unnamed_refused_in_model(client: ServerClient) -> str:
    tensor, stream = client.filled(), client.gpu.kernels.stream(0)
    parameters = {"capture": "GLOBAL", "blocking": True, "stream": "unnamed"}
    otherwise = "a model that waits for the whole GPU was not refused"
    refusal = raised(ShmError, otherwise, client.infer, tensor, cuda_stream=stream, parameters=parameters)
    client.require_quick(client.infer(tensor, cuda_stream=stream))  # it fails if the capture has not survived
    return str(refusal)


CHECKS: Final[Mapping[str, Check]] = {
    **{
        f"a capture in mode {mode} survives {what}": partial(check, mode=mode)
        for mode in CAPTURE_MODES
        for what, check in (
            ("named calls, dropped arrays and a closed client", _survives_in_client),
            ("requests to a model of its process", _survives_in_model),
        )
    },
    "a call without named streams is refused beside a capture on a blocking stream": _unnamed_refused_in_client,
    "a model without named streams is refused beside a capture on a blocking stream": _unnamed_refused_in_model,
}
