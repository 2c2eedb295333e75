"""Calls with tensors on a GPU, of a harness and of a real server: that they are right, and what they cost."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from shm_backend_utils.client import CopyWarning, PoolOptions, PreparedCall, ShmError
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.libraries import as_library
from shm_backend_utils.gpu.streams import named_stream

from ...figures import Figure, in_words
from ..report import Amounts, identity_medians, medians_of, raised, ratio, require
from .client import COUNT, DEVICE, NUMBERS, Check, ServerClient, TritonClient, over_empty

_HEAD: Final = 64


def _there_and_back(client: ServerClient) -> None:
    tensor = client.filled()
    with client.infer(tensor) as result:
        require(result.path == "direct", f"the call took the path {result.path}; client.explain() says why")
        require(type(result["OUTPUT0"]) is type(tensor), f"the result is a {type(result['OUTPUT0']).__name__}")
        client.require_quick(result)


def _named_library(client: ServerClient) -> None:
    library = client.gpu.kernels.name
    if library == "neither":
        with client.infer(NUMBERS) as result:
            require(isinstance(result["OUTPUT0"], DeviceArray), "without a library it is no DeviceArray")
        return
    with client.infer(NUMBERS, library=library) as result:
        found = type(result["OUTPUT0"]).__module__
        require(found.partition(".")[0] == library, f"library={library!r} gave an array of {found}")
        client.require_quick(result)


def _where_it_is(client: ServerClient) -> None:
    """A tensor inside a larger allocation changes while the model is held, which must see that; then it is unmapped."""
    gpu = client.gpu
    stream = gpu.kernels.stream(0)
    tensor = gpu.kernels.tensor(2 * COUNT, 0)[COUNT // 2 : COUNT // 2 + COUNT]
    x = gpu.described(tensor)
    for turn in range(2):
        gpu.upload(x, -NUMBERS)
        with warnings.catch_warnings(), client.gate.closed():
            warnings.simplefilter("error", CopyWarning)
            answer = client.others.submit(client.infer, tensor, cuda_stream=stream, parameters={"hold": "call"})
            client.launched(answer)
            gpu.upload(x, NUMBERS + turn)
        client.require_quick(answer.result(), NUMBERS + turn, f"turn {turn}")


def _in_place(client: ServerClient) -> None:
    gpu = client.gpu
    with client.prepared() as call:
        for turn in range(3):
            x = gpu.described(call.inputs["INPUT0"])
            gpu.upload(x, NUMBERS + turn)
            call.inputs_ready(gpu.stream)
            with call.infer() as result:
                y = gpu.described(result["OUTPUT0"])
                extents = gpu.runtime.extent(y.address, 0), gpu.runtime.extent(x.address, 0)
                require(extents[0] == extents[1], "the output lies in other memory")
                client.require_values(y, gpu.kernels.after_quick(NUMBERS + turn), f"turn {turn}")


def _prepared_tensor(client: ServerClient) -> None:
    tensor, room = client.filled(), {"OUTPUT0": ((COUNT,), np.float32, DEVICE)}
    with client.shm.prepare(client.model("work"), {"INPUT0": tensor}, outputs=room) as call:
        for turn in range(3):
            client.gpu.upload(client.gpu.described(tensor), NUMBERS + turn)
            client.require_quick(call.infer(), NUMBERS + turn, f"the output of turn {turn}")


def _passed_through(client: ServerClient) -> None:
    with client.prepared(work="pass") as call, call.infer() as result:
        x, y = (client.gpu.described(each) for each in (call.inputs["INPUT0"], result["OUTPUT0"]))
        require(x.address == y.address, "the output is not where the input is")


def _from_the_host(client: ServerClient) -> None:
    outputs = {"OUTPUT0": NUMBERS.nbytes}
    with client.shm.infer(client.model("work"), {"INPUT0": NUMBERS}, outputs=outputs) as result:
        require(result.path == "direct", f"the call took the path {result.path}")
        require(bool((result["OUTPUT0"] == client.gpu.kernels.after_quick(NUMBERS)).all()), "the output is wrong")


def _typed(client: ServerClient, name: str) -> str:
    gpu, dtype = client.gpu, BY_NAME[name].numpy
    patterns = np.random.default_rng(1).integers(0, 2, COUNT * dtype.itemsize, np.uint8)
    array = client.array(patterns.view(dtype))
    tensor = array if gpu.kernels.name == "neither" else as_library(array, gpu.kernels.name)
    room, model = {"OUTPUT0": ((COUNT,), dtype, DEVICE)}, f"gpu_pass_{name.lower()}"
    with client.shm.infer(model, {"INPUT0": tensor}, outputs=room, parameters={"work": "pass"}) as result:
        require(bool((client.found(result["OUTPUT0"]).view(np.uint8) == patterns).all()), "the bytes are others")
        return f"{getattr(tensor, 'dtype', '')} came back as {getattr(result['OUTPUT0'], 'dtype', '')}"


def _batches(client: ServerClient) -> str:
    rows, width, calls = 2, COUNT // 4, 4
    room: dict[str, Any] = {"OUTPUT0": ((rows, width), np.float32, DEVICE), "ROWS_ON_GPU": 4 * rows}
    tensors = [client.array(np.full((rows, width), number, np.float32)) for number in range(calls)]
    futures = [client.shm.submit("gpu_batch", {"INPUT0": tensor}, outputs=room) for tensor in tensors]
    sizes = set()
    for number, future in enumerate(futures):
        result = future.result()
        client.require_values(result["OUTPUT0"], np.float32(number), f"the output of call {number}")
        sizes |= {int(size) for size in np.asarray(result["ROWS_ON_GPU"]).ravel()}
    require(0 not in sizes, "a batch was on the host")
    return f"batches of {sorted(sizes)} rows"


def _several_gpus(client: ServerClient) -> str:
    devices = range(client.gpu.runtime.device_count())
    for device in devices:
        tensor = client.gpu.kernels.tensor(COUNT, device)
        client.gpu.upload(client.gpu.described(tensor), NUMBERS)
        room = {"OUTPUT0": ((COUNT,), np.float32, f"cuda:{device}")}
        with client.shm.infer(client.model("work"), {"INPUT0": tensor}, outputs=room) as result:
            found = client.gpu.described(result["OUTPUT0"])
            require(found.device == device, f"the output is on GPU {found.device}")
            client.require_quick(result)
    return f"{len(devices)} GPUs"


def _too_large(client: ServerClient) -> str:
    options = {"count": 2**45, "timeout_s": 2.0}
    error = raised(ShmError, "128 TiB on a GPU were served", client.infer, client.filled(), **options)
    _there_and_back(client)
    return f"{type(error).__name__}: {str(error)[:160]}"


def _normalize(client: ServerClient) -> str:
    images = np.random.default_rng(1).integers(0, 256, (2, 48, 64, 3), np.uint8)
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of photographs, as gpu_normalize has them
    expected = ((images / 255 - mean) / deviation).transpose(0, 3, 1, 2)
    wanted = {"NORMALIZED": (expected.shape, np.float32, DEVICE)}
    with client.shm.infer("gpu_normalize", {"IMAGES": client.array(images)}, outputs=wanted) as result:
        error = float(np.abs(client.found(result["NORMALIZED"]) - expected).max())
    require(error < 1e-5, f"the results differ by up to {error:g}")
    return f"they differ by at most {error:.1e}"


def _multiply(client: ServerClient) -> None:
    room = {"OUTPUT0": ((COUNT,), np.float32, DEVICE)}
    with client.shm.infer("gpu_multiply", {"INPUT0": client.filled()}, outputs=room) as result:
        client.require_values(result["OUTPUT0"], NUMBERS * 2)


CHECKS: Final[Mapping[str, Check]] = {
    "an array on a GPU goes to a model, and comes back as one of its library": _there_and_back,
    "a result is of the library that is named": _named_library,
    "a tensor inside another allocation is used where it is": _where_it_is,
    "a prepared call is filled, and answered, in one allocation": _in_place,
    "a prepared call has the user's tensor for its input": _prepared_tensor,
    "an input that is passed on stays where it is": _passed_through,
    "a model on the GPU serves the host, too": _from_the_host,
    "BF16 goes and comes back": functools.partial(_typed, name="BF16"),
    "bool goes and comes back": functools.partial(_typed, name="BOOL"),
    "calls side by side are a batch that stays on the GPU": _batches,
    "each GPU serves": _several_gpus,
    "what is too large for the GPU is told": _too_large,
}
OF_CUPY: Final[Mapping[str, Check]] = {
    "the sample gpu_multiply multiplies": _multiply,
    "the sample gpu_normalize gives what NumPy gives": _normalize,
}


def _identities(client: ServerClient) -> Callable[[int], AbstractContextManager[PreparedCall]]:
    return lambda byte_size: client.prepared(count=byte_size // 4, work="pass")


def _by_size(client: ServerClient, amounts: Amounts) -> list[Figure]:
    medians = identity_medians(_identities(client), PreparedCall.infer, amounts.identity_bytes, amounts.rounds)
    first, *_, last = medians
    unit = f"× identity of {first}"
    return [ratio(f"identity of {last}", medians[last], medians[first], unit, at_most=1.2)]


def _lent_or_copied(client: ServerClient, amounts: Amounts) -> list[Figure]:
    """Return what a call takes whose input is lent, over the same with a copy: the figure for ``lend_bytes``."""
    stream, figures = client.gpu.kernels.stream(0), []
    named = {"cuda_stream": stream, "parameters": {"work": "head"}}
    room = {"OUTPUT0": ((_HEAD,), np.float32, DEVICE)}
    with (
        client.another(pool=PoolOptions(lend_bytes=0)) as lending,
        client.another(pool=PoolOptions(lend_bytes=2**62)) as copying,
    ):
        for size in amounts.lent_bytes:
            given = {"INPUT0": client.gpu.kernels.tensor(size // 4, 0)}
            cases = {
                name: functools.partial(shm.infer, client.model("work"), given, outputs=room, **named)
                for name, shm in (("lent", lending), ("copied", copying))
            }
            medians = medians_of(amounts.slow_rounds, **cases)
            name = f"an input of {in_words(size)}, lent"
            figures.append(ratio(name, medians["lent"], medians["copied"], "× copied"))
    return figures


def _pinned(client: ServerClient, amounts: Amounts) -> list[Figure]:
    """Return how much faster a model brings an input from the host to its GPU if the memory is page-locked."""
    described = {"INPUT0": ((amounts.large_bytes // 4,), np.float32)}
    options: dict[str, Any] = {"outputs": {"OUTPUT0": _HEAD * 4}, "parameters": {"work": "head"}}
    with contextlib.ExitStack() as stack:
        calls = {
            kind: stack.enter_context(client.shm.prepare(client.model(kind), described, **options)).infer
            for kind in ("work", "pinned")
        }
        medians = medians_of(amounts.slow_rounds, **calls)
    name, unit = f"pinned to_device of {in_words(amounts.large_bytes)}", "times as fast as from pageable memory"
    return [ratio(name, medians["work"], medians["pinned"], unit, at_least=3.0)]


def _over_empty(client: TritonClient, amounts: Amounts) -> list[Figure]:
    sizes, rounds = amounts.identity_bytes, amounts.rounds
    medians = identity_medians(_identities(client), PreparedCall.infer, sizes, rounds, empty=client.infer_nothing)
    return over_empty("identity", medians, at_most=1.2)


def _kernel(client: TritonClient, amounts: Amounts) -> list[Figure]:
    """Return what a call takes that has the GPU do one thing, over its parts: the kernel alone and an empty request."""
    gpu, stream, count = client.gpu, client.gpu.kernels.stream(0), amounts.large_bytes // 4
    with client.prepared(count=count) as call:
        x = gpu.described(call.inputs["INPUT0"])
        gpu.upload(x, np.ones(count, np.float32))
        y = gpu.described(call.infer()["OUTPUT0"])

        def alone() -> None:
            gpu.kernels.quick(x, y, stream)
            gpu.runtime.synchronize_stream(named_stream(stream).handle, 0)

        medians = medians_of(amounts.rounds, empty=client.infer_nothing, kernel=alone, call=call.infer)
    floor, unit = medians["kernel"] + medians["empty"], "× (the kernel alone + an empty request)"
    basis = f"{medians['call']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)"
    name = f"a kernel on {in_words(amounts.large_bytes)}"
    return [Figure(name, medians["call"] / floor, unit, basis, at_most=1.1)]


MEASURES: Final[Mapping[str, Callable[[ServerClient, Amounts], list[Figure]]]] = {
    "identity on a GPU, by size": _by_size,
    "an input that is lent, or copied": _lent_or_copied,
    "to_device from pinned memory": _pinned,
}
OF_TRITON: Final[Mapping[str, Callable[[TritonClient, Amounts], list[Figure]]]] = {
    "identity on a GPU, over an empty request": _over_empty,
    "a kernel and its parts": _kernel,
}
