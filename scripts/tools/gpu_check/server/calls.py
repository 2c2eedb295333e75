"""Calls to a real server on the direct path, with tensors on a GPU: that they are right, and what they cost."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import CopyWarning, PreparedCall, ShmError
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.arrays.libraries import as_library
from shm_backend_utils.gpu.streams import named_stream

from .. import photographs
from ..machine import pool_memory
from ..report import Amounts, CheckFailedError, Report, identity_figures, kernel_figure, medians_ms, name_of, require
from .client import ServerCheck, ServerClient

COUNT: Final = 2**19
DEVICE: Final = "cuda:0"
ROOM: Final = {"OUTPUT0": ((COUNT,), np.float32, DEVICE)}
"""Where the output is wanted."""

_BRIEFLY_S: Final = 2.0


def _numbers() -> npt.NDArray[np.float32]:
    return np.arange(COUNT, dtype=np.float32)


def _described(client: ServerClient, array: Any) -> DeviceArray:
    """Return what an array of any library is, with nothing left to be written."""
    found = client.gpu.described(array)
    client.gpu.runtime.synchronize_device(0)
    return found


def _require_numbers(client: ServerClient, array: Any, expected: npt.NDArray[Any], what: str) -> None:
    require(bool((client.gpu.download(_described(client, array)) == expected).all()), f"{what} is wrong")


def _filled_tensor(client: ServerClient, values: npt.NDArray[np.float32]) -> Any:
    tensor = client.gpu.kernels.tensor(values.size, 0)
    client.gpu.upload(_described(client, tensor), values)
    return tensor


def _there_and_back(client: ServerClient) -> str:
    """The result is of the library that the input is of."""
    tensor = _filled_tensor(client, _numbers())
    with client.shm.infer(client.model("quick"), {"INPUT0": tensor}, outputs=ROOM) as result:
        require(result.path == "direct", f"the call took the path {result.path}; client.explain() says why")
        require(type(result["OUTPUT0"]) is type(tensor), f"the result is a {type(result['OUTPUT0']).__name__}")
        _require_numbers(client, result["OUTPUT0"], client.gpu.kernels.after_quick(_numbers()), "the output")
    return ""


def _named_library(client: ServerClient) -> str:
    """The result is of the library that the caller names, also where the input is on the host."""
    if client.gpu.kernels.name == "neither":
        with client.shm.infer(client.model("quick"), {"INPUT0": _numbers()}, outputs=ROOM) as result:
            require(isinstance(result["OUTPUT0"], DeviceArray), "without a library it is no DeviceArray")
        return ""
    library: Any = client.gpu.kernels.name
    with client.shm.infer(client.model("quick"), {"INPUT0": _numbers()}, outputs=ROOM, library=library) as result:
        found = type(result["OUTPUT0"]).__module__
        require(found.partition(".")[0] == library, f"library={library!r} gave an array of {found}")
        _require_numbers(client, result["OUTPUT0"], client.gpu.kernels.after_quick(_numbers()), "the output")
    return ""


def _where_it_is(client: ServerClient) -> str:
    """A tensor of the user's, inside a larger allocation, is copied by nobody; and it may be written anew at once."""
    gpu = client.gpu
    whole = gpu.kernels.tensor(2 * COUNT, 0)
    tensor = whole[COUNT // 2 : COUNT // 2 + COUNT]
    for turn in range(3):
        gpu.upload(_described(client, tensor), _numbers() + turn)
        before = gpu.counts.so_far()["copy"]
        with warnings.catch_warnings():
            warnings.simplefilter("error", CopyWarning)
            result = client.shm.infer(client.model("quick"), {"INPUT0": tensor}, outputs=ROOM)
        copies = gpu.counts.so_far()["copy"] - before
        require(copies == 0, f"the client made {copies} copies")
        _require_numbers(client, result["OUTPUT0"], gpu.kernels.after_quick(_numbers() + turn), f"turn {turn}")
    return ""


def _pool_memory(client: ServerClient) -> str:
    """Memory of CUDA's pools cannot be exported: it is copied once, and that is told."""
    gpu = client.gpu
    tensor = pool_memory(gpu.runtime, COUNT)
    gpu.upload(tensor, _numbers())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CopyWarning)
        result = client.shm.infer(client.model("quick"), {"INPUT0": tensor}, outputs=ROOM)
    _require_numbers(client, result["OUTPUT0"], gpu.kernels.after_quick(_numbers()), "the output")
    told = [str(each.message) for each in caught if issubclass(each.category, CopyWarning)]
    require(bool(told), "no CopyWarning told of it")
    return told[0]


def _named_stream(client: ServerClient) -> str:
    """What is on a stream that was named is waited for, and the result comes on it."""
    gpu = client.gpu
    stream = gpu.kernels.stream(0)
    source, tensor = _filled_tensor(client, _numbers()), gpu.kernels.tensor(COUNT, 0)
    x, y = _described(client, source), _described(client, tensor)
    expected = gpu.kernels.after_quick(gpu.kernels.after_late(_numbers()))
    for model in ("quick", "quick_by_event"):
        # Who had the memory before has named no stream, so that the first call there waits for the whole GPU.
        client.shm.infer(client.model(model), {"INPUT0": tensor}, outputs=ROOM, stream=stream).release()
        gpu.kernels.late(x, y, stream)
        before = gpu.counts.so_far()
        result = client.shm.infer(client.model(model), {"INPUT0": tensor}, outputs=ROOM, stream=stream)
        after = gpu.counts.so_far()
        whole = [name for name in ("synchronize_device", "record_device") if after[name] > before[name]]
        require(not whole, f"the client waited for the whole GPU ({', '.join(whole)}), and a stream was named")
        copied = gpu.kernels.tensor(COUNT, 0)
        with gpu.runtime.on(0):  # on the stream, so that nothing else is waited for
            found = imported(gpu.runtime, result["OUTPUT0"], named_stream(stream).handle)
            target = imported(gpu.runtime, copied, named_stream(stream).handle)
            gpu.runtime.copy(target.address, found.address, COUNT * 4, named_stream(stream).handle)
        gpu.runtime.synchronize_stream(named_stream(stream).handle, 0)
        _require_numbers(client, copied, expected, f"the output of {model}")
    return ""


def _not_named(client: ServerClient) -> str:
    """Without a name, the whole GPU is waited for, whatever stream the work is on."""
    gpu = client.gpu
    source, tensor = _filled_tensor(client, _numbers()), gpu.kernels.tensor(COUNT, 0)
    gpu.kernels.late(_described(client, source), _described(client, tensor), gpu.kernels.stream(0))
    with client.shm.infer(client.model("late"), {"INPUT0": tensor}, outputs=ROOM) as result:
        expected = gpu.kernels.after_late(gpu.kernels.after_late(_numbers()))
        _require_numbers(client, result["OUTPUT0"], expected, "the output")
    return ""


def _in_place(client: ServerClient) -> str:
    gpu = client.gpu
    with _prepared(client, client.model("quick"), COUNT) as call:
        for turn in range(3):
            x = _described(client, call.inputs["INPUT0"])
            gpu.upload(x, _numbers() + turn)
            call.inputs_ready(gpu.stream)
            with call.infer() as result:
                y = _described(client, result["OUTPUT0"])
                require(
                    gpu.runtime.extent(y.address, 0) == gpu.runtime.extent(x.address, 0),
                    "the output lies in other memory",
                )
                _require_numbers(client, y, gpu.kernels.after_quick(_numbers() + turn), f"turn {turn}")
    return ""


def _prepared_tensor(client: ServerClient) -> str:
    """A tensor of the user's is the input's memory as long as the prepared call lives."""
    gpu = client.gpu
    tensor = _filled_tensor(client, _numbers())
    with client.shm.prepare(client.model("quick"), {"INPUT0": tensor}, outputs=ROOM) as call:
        for turn in range(3):
            gpu.upload(_described(client, tensor), _numbers() + turn)
            result = call.infer()
            _require_numbers(
                client, result["OUTPUT0"], gpu.kernels.after_quick(_numbers() + turn), f"the output of turn {turn}"
            )
    return ""


def _passed_through(client: ServerClient) -> str:
    with _prepared(client, "gpu_identity", COUNT) as call, call.infer() as result:
        x, y = (_described(client, each) for each in (call.inputs["INPUT0"], result["OUTPUT0"]))
        require(x.address == y.address, "the output is not where the input is")
    return ""


def _from_the_host(client: ServerClient) -> str:
    numbers = _numbers()
    outputs = {"OUTPUT0": numbers.nbytes}
    with client.shm.infer(client.model("quick"), {"INPUT0": numbers}, outputs=outputs) as result:
        require(result.path == "direct", f"the call took the path {result.path}")
        expected = client.gpu.kernels.after_quick(numbers)
        require(bool((result["OUTPUT0"] == expected).all()), "the output is wrong")
    return ""


def _typed(client: ServerClient, name: str) -> str:
    """A tensor of that type goes to a model and comes back, as the library has it."""
    gpu, dtype = client.gpu, BY_NAME[name].numpy
    patterns = np.random.default_rng(1).integers(0, 2, COUNT * dtype.itemsize, np.uint8)
    memory = _described(client, gpu.kernels.tensor(COUNT * dtype.itemsize // 4, 0))
    array = DeviceArray(gpu.runtime, memory.address, (COUNT,), dtype, 0, memory)
    gpu.upload(array, patterns.view(dtype))
    tensor = array if gpu.kernels.name == "neither" else as_library(array, gpu.kernels.name)
    room = {"OUTPUT0": ((COUNT,), dtype, DEVICE)}
    with client.shm.infer(f"gpu_identity_{name.lower()}", {"INPUT0": tensor}, outputs=room) as result:
        found = gpu.download(_described(client, result["OUTPUT0"])).view(np.uint8)
        require(bool((found == patterns).all()), "the bytes are others")
        return f"{getattr(tensor, 'dtype', '')} came back as {getattr(result['OUTPUT0'], 'dtype', '')}"


def _batches(client: ServerClient) -> str:
    """Calls side by side are one batch, on the GPU."""
    gpu, rows, width, calls = client.gpu, 2, COUNT // 4, 4
    room: dict[str, Any] = {"OUTPUT0": ((rows, width), np.float32, DEVICE), "ROWS_ON_GPU": 4 * rows}
    tensors = []
    for number in range(calls):
        memory = _described(client, gpu.kernels.tensor(rows * width, 0)).reshape(rows, width)
        gpu.upload(memory, np.full((rows, width), number, np.float32))
        tensors.append(memory)
    futures = [client.shm.submit("gpu_batch", {"INPUT0": tensor}, outputs=room) for tensor in tensors]
    sizes = set()
    for number, future in enumerate(futures):
        result = future.result()
        _require_numbers(client, result["OUTPUT0"], np.float32(number), f"the output of call {number}")
        sizes |= {int(size) for size in np.asarray(result["ROWS_ON_GPU"]).ravel()}
    require(0 not in sizes, "a batch was on the host")
    return f"batches of {sorted(sizes)} rows"


def _too_large(client: ServerClient) -> str:
    """What the GPU has no room for is an error that says so, and the next call is served."""
    room = {"OUTPUT0": ((2**45,), np.float32, DEVICE)}
    try:
        tensor = _filled_tensor(client, _numbers())
        client.shm.infer(client.model("quick"), {"INPUT0": tensor}, outputs=room, timeout_s=_BRIEFLY_S)
    except ShmError as error:
        _there_and_back(client)
        return f"{type(error).__name__}: {str(error)[:160]}"
    raise CheckFailedError("128 TiB on a GPU were served")


def _normalize(client: ServerClient) -> str:
    noise = photographs.noise()
    memory = _described(client, client.gpu.kernels.tensor(noise.size // 4, 0))
    images = DeviceArray(client.gpu.runtime, memory.address, noise.shape, np.dtype(np.uint8), 0, memory)
    client.gpu.upload(images, noise)
    shape = photographs.COUNT, 3, photographs.HEIGHT, photographs.WIDTH
    wanted = {"NORMALIZED": (shape, np.float32, DEVICE)}
    with client.shm.infer("gpu_normalize", {"IMAGES": images}, outputs=wanted) as result:
        return photographs.compared(client.gpu.download(_described(client, result["NORMALIZED"])))


def _multiply(client: ServerClient) -> str:
    with client.shm.infer("gpu_multiply", {"INPUT0": _filled_tensor(client, _numbers())}, outputs=ROOM) as result:
        _require_numbers(client, result["OUTPUT0"], _numbers() * 2, "the output")
    return ""


CHECKS: Final[Mapping[str, ServerCheck]] = {
    "an array on a GPU goes to a model, and comes back as one of its library": _there_and_back,
    "a result is of the library that is named": _named_library,
    "a tensor inside another allocation is used where it is, and nothing is copied": _where_it_is,
    "memory that cannot be exported is copied once, and that is told": _pool_memory,
    "a stream that is named is waited for, and nothing else is": _named_stream,
    "without a name all streams are waited for": _not_named,
    "a prepared call is filled, and answered, in one allocation": _in_place,
    "a prepared call has the user's tensor for its input": _prepared_tensor,
    "an input that is passed on stays where it is": _passed_through,
    "a model on the GPU serves the host, too": _from_the_host,
    "BF16 goes and comes back": functools.partial(_typed, name="BF16"),
    "bool goes and comes back": functools.partial(_typed, name="BOOL"),
    "calls side by side are a batch that stays on the GPU": _batches,
    "what is too large for the GPU is told": _too_large,
}
OF_CUPY: Final[Mapping[str, ServerCheck]] = {
    "the sample gpu_multiply multiplies": _multiply,
    "the sample gpu_normalize gives what NumPy gives": _normalize,
}


def measure_identity(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    """Measure what it takes, next to an empty request."""
    with ExitStack() as stack:
        cases: dict[str, Callable[[], object]] = {"empty": client.infer_nothing}
        for size in amounts.identity_bytes:
            cases[name_of(size)] = stack.enter_context(_prepared(client, "gpu_identity", size // 4)).infer
        medians = medians_ms(cases, amounts.rounds)
    return report.measured(
        *identity_figures(group, "identity", medians, amounts.identity_bytes, is_held=True, binds=True)
    )


def measure_kernel(report: Report, group: str, client: ServerClient, amounts: Amounts) -> str:
    """Measure what a call takes that has the GPU do one thing, next to its parts."""
    gpu, count = client.gpu, amounts.large_bytes // 4
    model = "gpu_multiply" if gpu.kernels.name == "cupy" else client.model("quick")
    stream = gpu.kernels.stream(0)
    with _prepared(client, model, count) as call:
        x = _described(client, call.inputs["INPUT0"])
        gpu.upload(x, np.ones(count, np.float32))
        y = _described(client, call.infer()["OUTPUT0"])

        def kernel_alone() -> None:
            gpu.kernels.quick(x, y, stream)
            gpu.runtime.synchronize_stream(named_stream(stream).handle, 0)

        cases: dict[str, Callable[[], object]] = {
            "empty": client.infer_nothing,
            "kernel": kernel_alone,
            "call": call.infer,
        }
        medians = medians_ms(cases, amounts.rounds)
    return report.measured(kernel_figure(group, gpu.kernels.name, medians, amounts.large_bytes, binds=True))


def _prepared(client: ServerClient, model: str, count: int) -> contextlib.AbstractContextManager[PreparedCall]:
    place = (count,), np.float32, DEVICE
    return client.shm.prepare(model, {"INPUT0": place}, outputs={"OUTPUT0": place})
