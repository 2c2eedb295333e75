"""The ways that a photograph can take to the model and back, all over gRPC, measured side by side."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
import skimage
import tritonclient.grpc as grpcclient
from skimage import io
from tritonclient.utils import np_to_triton_dtype, shared_memory

from ...client import ShmClient
from ..common.registered_regions import registered_region
from ..common.rounds import shuffled

__all__ = ["PATHS", "WARM_UP_ROUNDS", "Measurement", "Photograph", "load_photographs", "measure", "measure_wire_bytes"]

MODEL: Final = "image_resize_normalize"
OUTPUT_SHAPE: Final = (3, 224, 224)
OUTPUT_NBYTES: Final = 3 * 224 * 224 * 4
TIMEOUT_S: Final = 30.0

Request = Callable[[], npt.NDArray[np.float32]]
"""Makes one request and returns the normalized photograph."""

_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
_UNLIMITED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_FILES: Final = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "motorcycle": "motorcycle_left.png",
    "tissue": "ihc.png",
    "deep field": "hubble_deep_field.jpg",
    "retina": "retina.jpg",
}

WARM_UP_ROUNDS: Final = 3

Photograph = npt.NDArray[np.uint8]
"""Height, width, RGB."""


class RequestPath(NamedTuple):
    """One way to the model and back."""

    name: str
    copies: str  # of the tensors' data, between the client's memory and the model's
    # Connects to a URL, and returns a function. That one prepares a photograph, and returns a request that can be sent
    # again and again. The stack cleans up.
    connect: Callable[[str, contextlib.ExitStack], Callable[[Photograph], Request]]


def load_photographs() -> dict[str, Photograph]:
    """Return the photographs by name; FileNotFoundError if the package has none of them."""
    # scikit-image's own functions would download those that a release leaves out.
    folder = Path(skimage.__file__).parent / "data"
    files = {name: folder / file for name, file in _FILES.items()}
    photographs = {name: _read(file) for name, file in files.items() if file.is_file()}
    if not photographs:
        raise FileNotFoundError("scikit-image has no photographs in its package")
    return photographs


def _read(file: Path) -> Photograph:
    without_alpha = io.imread(file)[:, :, :3]
    return np.ascontiguousarray(without_alpha, np.uint8)


def _direct(url: str, stack: contextlib.ExitStack) -> Callable[[Photograph], Request]:
    """Fill a prepared call of our client: the model reads and writes where the client has its tensors."""
    client = stack.enter_context(ShmClient(url))

    def place(photograph: Photograph) -> Request:
        shapes = {"IMAGE": (photograph.shape, photograph.dtype)}
        call = stack.enter_context(client.prepare(MODEL, shapes))
        call.inputs["IMAGE"][:] = photograph
        return lambda: call.infer(timeout_s=TIMEOUT_S)["NORMALIZED"]

    return place


def _triton_shm(url: str, stack: contextlib.ExitStack) -> Callable[[Photograph], Request]:
    """Fill a region of Triton's own shared memory by plain tritonclient, and make one for the output."""
    client = stack.enter_context(grpcclient.InferenceServerClient(url))

    def place(photograph: Photograph) -> Request:
        name = f"demo-{os.getpid()}-{secrets.token_hex(4)}"
        source = registered_region(stack, client, f"{name}-in", photograph.nbytes)
        sink = registered_region(stack, client, f"{name}-out", OUTPUT_NBYTES)
        shared_memory.set_shared_memory_region(source.handle, [photograph])
        image = grpcclient.InferInput("IMAGE", photograph.shape, "UINT8")
        image.set_shared_memory(source.name, photograph.nbytes)
        normalized = grpcclient.InferRequestedOutput("NORMALIZED")
        normalized.set_shared_memory(sink.name, OUTPUT_NBYTES)

        def request() -> npt.NDArray[np.float32]:
            client.infer(MODEL, [image], outputs=[normalized], client_timeout=TIMEOUT_S)
            view: npt.NDArray[np.float32] = shared_memory.get_contents_as_numpy(sink.handle, np.float32, OUTPUT_SHAPE)
            return view

        return request

    return place


def _inline(url: str, stack: contextlib.ExitStack) -> Callable[[Photograph], Request]:
    """Put the tensors into the messages of plain tritonclient, anew in each request."""
    client = stack.enter_context(grpcclient.InferenceServerClient(url))
    return lambda photograph: lambda: _output(client, MODEL, _tensor("IMAGE", photograph), "NORMALIZED")


def _empty(url: str, stack: contextlib.ExitStack) -> Callable[[Photograph], Request]:
    """Send an empty tensor to a model that does nothing, by plain tritonclient: the least time that a request takes."""
    client = stack.enter_context(grpcclient.InferenceServerClient(url))
    nothing = _tensor("INPUT0", np.empty(0, np.float32))
    return lambda _: lambda: _output(client, "identity", nothing, "OUTPUT0")


def _tensor(name: str, values: npt.NDArray[Any]) -> Any:
    tensor = grpcclient.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def _output(client: Any, model: str, tensor: Any, name: str) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = client.infer(model, [tensor], client_timeout=TIMEOUT_S).as_numpy(name)
    return array


PATHS: Final = (
    RequestPath("direct", "0 in, 0 out", _direct),
    RequestPath("triton-shm", "1 in, 2 out", _triton_shm),
    RequestPath("inline", "several", _inline),
    RequestPath("empty", "none", _empty),
)


class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes messages on, from clients that connect to ``url``, and counts the bytes of inference both ways."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.url = ""
        self.byte_count = 0

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler for a call, in which messages are bytes: no serializer is given to either side."""
        method = handler_call_details.method
        call = self._channel.unary_unary(method)

        def pass_on(request: bytes, context: Any) -> bytes:
            try:
                response: bytes = call(request)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            if method == _INFER:
                self.byte_count += len(request) + len(response)
            return response

        return grpc.unary_unary_rpc_method_handler(pass_on)


@contextlib.contextmanager
def relay_to(server_url: str) -> Iterator[Relay]:
    """Run a relay to a server on a free loopback port."""
    with grpc.insecure_channel(server_url, options=_UNLIMITED) as channel, ThreadPoolExecutor(2) as threads:
        relay = Relay(channel)
        server = grpc.server(threads, handlers=[relay], options=_UNLIMITED)
        relay.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield relay
        finally:
            server.stop(grace=None).wait()


@dataclass
class Measurement:
    """The measurements of all paths."""

    milliseconds: dict[str, list[float]]  # per path, one for each request
    outputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # the normalized photographs by name
    differing: set[str] = field(default_factory=set)  # photographs of which the paths gave different bytes

    def percentile(self, path: str, percent: float) -> float:
        """Return a path's percentile over all of its requests, in milliseconds."""
        return float(np.percentile(self.milliseconds[path], percent))


def measure(url: str, photographs: dict[str, Photograph], rounds: int, on_round: Callable[[], None]) -> Measurement:
    """Send every photograph on every path, once per round, so other work of the machine slows all paths alike."""
    measurement = Measurement({path.name: [] for path in PATHS})
    with _placed(url, photographs) as requests:
        for round_number in range(-WARM_UP_ROUNDS, rounds):
            for photograph, by_path in requests.items():
                milliseconds, are_identical, output = _send(by_path, shuffled(by_path, round_number))
                measurement.outputs[photograph] = output
                if not are_identical:
                    measurement.differing.add(photograph)
                if round_number >= 0:
                    for path, value in milliseconds.items():
                        measurement.milliseconds[path].append(value)
            on_round()
    return measurement


def _send(by_path: dict[str, Request], order: list[str]) -> tuple[dict[str, float], bool, npt.NDArray[np.float32]]:
    """Make one request on every path; return their times, whether all results are the same bytes, and one of these."""
    milliseconds, results = {}, {}
    for path in order:
        started = time.perf_counter()
        results[path] = by_path[path]()
        milliseconds[path] = (time.perf_counter() - started) * 1e3
    del results["empty"]
    are_identical = len({(result.dtype, result.shape, result.tobytes()) for result in results.values()}) == 1
    output = results["inline"].copy()
    for result in results.values():
        if result.flags.writeable:  # shared memory: a request that writes nothing must not look right
            result.fill(np.nan)
    return milliseconds, are_identical, output


def measure_wire_bytes(url: str, photographs: dict[str, Photograph]) -> dict[str, dict[str, int]]:
    """Return the bytes of one request and its response, by path and photograph."""
    with relay_to(url) as relay, _placed(relay.url, photographs) as requests:
        counts: dict[str, dict[str, int]] = {path.name: {} for path in PATHS}
        for photograph, by_path in requests.items():
            for path, request in by_path.items():
                before = relay.byte_count
                request()
                counts[path][photograph] = relay.byte_count - before
    return counts


@contextlib.contextmanager
def _placed(url: str, photographs: dict[str, Photograph]) -> Iterator[dict[str, dict[str, Request]]]:
    with contextlib.ExitStack() as stack:
        places = {path.name: path.connect(url, stack) for path in PATHS}
        yield {
            name: {path: place(photograph) for path, place in places.items()}
            for name, photograph in photographs.items()
        }
