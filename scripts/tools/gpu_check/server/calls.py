"""Calls to a real server on the direct path, with tensors on a GPU: that they are right, and what they cost."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import CopyWarning, PreparedCall, ShmError
from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.gpu.arrays.device_array import DeviceArray, viewed
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.arrays.libraries import as_library
from shm_backend_utils.gpu.streams import named_stream

from ...figures import in_words
from ..gpu import pool_memory
from ..report import Amounts, Figure, identity_medians, medians_of, raised, require
from .client import Measure, ServerCheck, ServerClient, over_empty

COUNT: Final = 2**19
DEVICE: Final = "cuda:0"
ROOM: Final = {"OUTPUT0": ((COUNT,), np.float32, DEVICE)}
"""Where the output is wanted."""

NUMBERS: Final = np.arange(COUNT, dtype=np.float32)
_BRIEFLY_S: Final = 2.0
_MOST_OF_EMPTY: Final = 1.2
_MOST_OF_THE_FLOOR: Final = 1.1
_KERNELS: Final = {"cupy": "gpu_multiply", "torch": "torch.mul", "neither": "a copy on the GPU"}
"""What the kernel is that a call is measured with, by library."""
_MEAN: Final = np.array([0.485, 0.456, 0.406])  # of photographs, as gpu_normalize has them
_STD: Final = np.array([0.229, 0.224, 0.225])
_MOST_ERROR: Final = 1e-5


def _described(client: ServerClient, array: Any) -> DeviceArray:
    """Return what an array of any library is, with nothing left to be written."""
    found = client.gpu.described(array)
    client.gpu.runtime.synchronize_device(0)
    return found


def _require_values(client: ServerClient, array: Any, expected: npt.NDArray[Any], what: str = "the output") -> None:
    require(bool((client.gpu.download(_described(client, array)) == expected).all()), f"{what} is wrong")


def _require_quick(
    client: ServerClient, result: Any, numbers: npt.NDArray[np.float32] = NUMBERS, what: str = "the output"
) -> None:
    _require_values(client, result["OUTPUT0"], client.gpu.kernels.after_quick(numbers), what)


def _filled_tensor(client: ServerClient) -> Any:
    tensor = client.gpu.kernels.tensor(COUNT, 0)
    client.gpu.upload(_described(client, tensor), NUMBERS)
    return tensor


def _array(client: ServerClient, values: npt.NDArray[Any]) -> DeviceArray:
    """Return these values in memory that the library has allocated."""
    memory = _described(client, client.gpu.kernels.tensor(values.nbytes // 4, 0))
    array = viewed(memory, shape=values.shape, dtype=values.dtype)
    client.gpu.upload(array, values)
    return array


def _infer(client: ServerClient, work: str, x: Any, **options: Any) -> Any:
    return client.shm.infer(client.model(work), {"INPUT0": x}, outputs=ROOM, **options)


def _prepared(client: ServerClient, model: str, count: int) -> AbstractContextManager[PreparedCall]:
    place = (count,), np.float32, DEVICE
    return client.shm.prepare(model, {"INPUT0": place}, outputs={"OUTPUT0": place})


def _there_and_back(client: ServerClient) -> None:
    tensor = _filled_tensor(client)
    with _infer(client, "quick", tensor) as result:
        require(result.path == "direct", f"the call took the path {result.path}; client.explain() says why")
        require(type(result["OUTPUT0"]) is type(tensor), f"the result is a {type(result['OUTPUT0']).__name__}")
        _require_quick(client, result)


def _named_library(client: ServerClient) -> None:
    library = client.gpu.kernels.name
    if library == "neither":
        with _infer(client, "quick", NUMBERS) as result:
            require(isinstance(result["OUTPUT0"], DeviceArray), "without a library it is no DeviceArray")
        return
    with _infer(client, "quick", NUMBERS, library=library) as result:
        found = type(result["OUTPUT0"]).__module__
        require(found.partition(".")[0] == library, f"library={library!r} gave an array of {found}")
        _require_quick(client, result)


def _where_it_is(client: ServerClient) -> None:
    """A user's tensor inside a larger allocation is not copied; it may be written again at once."""
    gpu = client.gpu
    whole = gpu.kernels.tensor(2 * COUNT, 0)
    tensor = whole[COUNT // 2 : COUNT // 2 + COUNT]
    for turn in range(3):
        gpu.upload(_described(client, tensor), NUMBERS + turn)
        before = gpu.counts["copy"]
        with warnings.catch_warnings():
            warnings.simplefilter("error", CopyWarning)
            result = _infer(client, "quick", tensor)
        copies = gpu.counts["copy"] - before
        require(copies == 0, f"the client made {copies} copies")
        _require_quick(client, result, NUMBERS + turn, f"turn {turn}")


def _pool_memory(client: ServerClient) -> str:
    tensor = pool_memory(client.gpu.runtime, COUNT)
    client.gpu.upload(tensor, NUMBERS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CopyWarning)
        result = _infer(client, "quick", tensor)
    _require_quick(client, result)
    told = [str(each.message) for each in caught if issubclass(each.category, CopyWarning)]
    require(bool(told), "no CopyWarning told of it")
    return told[0]


def _named_stream(client: ServerClient) -> None:
    gpu = client.gpu
    stream = gpu.kernels.stream(0)
    handle = named_stream(stream).handle
    source, tensor = _filled_tensor(client), gpu.kernels.tensor(COUNT, 0)
    x, y = _described(client, source), _described(client, tensor)
    expected = gpu.kernels.after_quick(gpu.kernels.after_late(NUMBERS))
    for work in ("quick", "quick_by_event"):
        # Who had the memory before has named no stream, so that the first call there waits for the whole GPU.
        _infer(client, work, tensor, cuda_stream=stream).release()
        gpu.kernels.late(x, y, stream)
        before = gpu.counts.copy()
        result = _infer(client, work, tensor, cuda_stream=stream)
        whole = [name for name in ("synchronize_device", "record_device") if gpu.counts[name] > before[name]]
        require(not whole, f"the client waited for the whole GPU ({', '.join(whole)}), and a stream was named")
        copied = gpu.kernels.tensor(COUNT, 0)
        with gpu.runtime.on(0):  # on the stream, so that nothing else is waited for
            found = imported(gpu.runtime, result["OUTPUT0"], handle)
            target = imported(gpu.runtime, copied, handle)
            gpu.runtime.copy(target.address, found.address, COUNT * 4, handle)
        gpu.runtime.synchronize_stream(handle, 0)
        _require_values(client, copied, expected, f"the output of {client.model(work)}")


def _not_named(client: ServerClient) -> None:
    gpu = client.gpu
    source, tensor = _filled_tensor(client), gpu.kernels.tensor(COUNT, 0)
    gpu.kernels.late(_described(client, source), _described(client, tensor), gpu.kernels.stream(0))
    with _infer(client, "late", tensor) as result:
        expected = gpu.kernels.after_late(gpu.kernels.after_late(NUMBERS))
        _require_values(client, result["OUTPUT0"], expected)


def _in_place(client: ServerClient) -> None:
    gpu = client.gpu
    with _prepared(client, client.model("quick"), COUNT) as call:
        for turn in range(3):
            x = _described(client, call.inputs["INPUT0"])
            gpu.upload(x, NUMBERS + turn)
            call.inputs_ready(gpu.stream)
            with call.infer() as result:
                y = _described(client, result["OUTPUT0"])
                extents = gpu.runtime.extent(y.address, 0), gpu.runtime.extent(x.address, 0)
                require(extents[0] == extents[1], "the output lies in other memory")
                _require_values(client, y, gpu.kernels.after_quick(NUMBERS + turn), f"turn {turn}")


def _prepared_tensor(client: ServerClient) -> None:
    tensor = _filled_tensor(client)
    with client.shm.prepare(client.model("quick"), {"INPUT0": tensor}, outputs=ROOM) as call:
        for turn in range(3):
            client.gpu.upload(_described(client, tensor), NUMBERS + turn)
            _require_quick(client, call.infer(), NUMBERS + turn, f"the output of turn {turn}")


def _passed_through(client: ServerClient) -> None:
    with _prepared(client, "gpu_identity_fp32", COUNT) as call, call.infer() as result:
        x, y = (_described(client, each) for each in (call.inputs["INPUT0"], result["OUTPUT0"]))
        require(x.address == y.address, "the output is not where the input is")


def _from_the_host(client: ServerClient) -> None:
    outputs = {"OUTPUT0": NUMBERS.nbytes}
    with client.shm.infer(client.model("quick"), {"INPUT0": NUMBERS}, outputs=outputs) as result:
        require(result.path == "direct", f"the call took the path {result.path}")
        expected = client.gpu.kernels.after_quick(NUMBERS)
        require(bool((result["OUTPUT0"] == expected).all()), "the output is wrong")


def _typed(client: ServerClient, name: str) -> str:
    gpu, dtype = client.gpu, BY_NAME[name].numpy
    patterns = np.random.default_rng(1).integers(0, 2, COUNT * dtype.itemsize, np.uint8)
    array = _array(client, patterns.view(dtype))
    tensor = array if gpu.kernels.name == "neither" else as_library(array, gpu.kernels.name)
    room = {"OUTPUT0": ((COUNT,), dtype, DEVICE)}
    with client.shm.infer(f"gpu_identity_{name.lower()}", {"INPUT0": tensor}, outputs=room) as result:
        found = gpu.download(_described(client, result["OUTPUT0"])).view(np.uint8)
        require(bool((found == patterns).all()), "the bytes are others")
        return f"{getattr(tensor, 'dtype', '')} came back as {getattr(result['OUTPUT0'], 'dtype', '')}"


def _batches(client: ServerClient) -> str:
    rows, width, calls = 2, COUNT // 4, 4
    room: dict[str, Any] = {"OUTPUT0": ((rows, width), np.float32, DEVICE), "ROWS_ON_GPU": 4 * rows}
    tensors = [_array(client, np.full((rows, width), number, np.float32)) for number in range(calls)]
    futures = [client.shm.submit("gpu_batch", {"INPUT0": tensor}, outputs=room) for tensor in tensors]
    sizes = set()
    for number, future in enumerate(futures):
        result = future.result()
        _require_values(client, result["OUTPUT0"], np.float32(number), f"the output of call {number}")
        sizes |= {int(size) for size in np.asarray(result["ROWS_ON_GPU"]).ravel()}
    require(0 not in sizes, "a batch was on the host")
    return f"batches of {sorted(sizes)} rows"


def _too_large(client: ServerClient) -> str:
    room = {"OUTPUT0": ((2**45,), np.float32, DEVICE)}
    inputs, infer = {"INPUT0": _filled_tensor(client)}, client.shm.infer
    otherwise = "128 TiB on a GPU were served"
    error = raised(ShmError, otherwise, infer, client.model("quick"), inputs, outputs=room, timeout_s=_BRIEFLY_S)
    _there_and_back(client)
    return f"{type(error).__name__}: {str(error)[:160]}"


def _normalize(client: ServerClient) -> str:
    images = np.random.default_rng(1).integers(0, 256, (2, 48, 64, 3), np.uint8)
    expected = ((images / 255 - _MEAN) / _STD).transpose(0, 3, 1, 2)
    wanted = {"NORMALIZED": (expected.shape, np.float32, DEVICE)}
    with client.shm.infer("gpu_normalize", {"IMAGES": _array(client, images)}, outputs=wanted) as result:
        normalized = client.gpu.download(_described(client, result["NORMALIZED"]))
    error = float(np.abs(normalized - expected).max())
    require(error < _MOST_ERROR, f"the results differ by up to {error:g}")
    return f"they differ by at most {error:.1e}"


def _multiply(client: ServerClient) -> None:
    with client.shm.infer("gpu_multiply", {"INPUT0": _filled_tensor(client)}, outputs=ROOM) as result:
        _require_values(client, result["OUTPUT0"], NUMBERS * 2)


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


def _identity(client: ServerClient, amounts: Amounts) -> list[Figure]:
    def prepared(byte_size: int) -> AbstractContextManager[PreparedCall]:
        return _prepared(client, "gpu_identity_fp32", byte_size // 4)

    medians = identity_medians(
        prepared, PreparedCall.infer, amounts.identity_bytes, amounts.rounds, empty=client.infer_nothing
    )
    return over_empty("identity", medians, at_most=_MOST_OF_EMPTY)


def _kernel(client: ServerClient, amounts: Amounts) -> list[Figure]:
    """Return what a call takes that has the GPU do one thing, over its parts: the kernel alone and an empty request."""
    gpu, count = client.gpu, amounts.large_bytes // 4
    model = "gpu_multiply" if gpu.kernels.name == "cupy" else client.model("quick")
    stream = gpu.kernels.stream(0)
    with _prepared(client, model, count) as call:
        x = _described(client, call.inputs["INPUT0"])
        gpu.upload(x, np.ones(count, np.float32))
        y = _described(client, call.infer()["OUTPUT0"])

        def alone() -> None:
            gpu.kernels.quick(x, y, stream)
            gpu.runtime.synchronize_stream(named_stream(stream).handle, 0)

        medians = medians_of(amounts.rounds, empty=client.infer_nothing, kernel=alone, call=call.infer)
    name = f"{_KERNELS[gpu.kernels.name]} of {in_words(amounts.large_bytes)}"
    floor, unit = medians["kernel"] + medians["empty"], "× (the kernel alone + an empty request)"
    basis = f"{medians['call']:.4f} ms / ({medians['kernel']:.4f} ms + {medians['empty']:.4f} ms)"
    return [Figure(name, medians["call"] / floor, unit, basis, at_most=_MOST_OF_THE_FLOOR)]


MEASURES: Final[Mapping[str, Measure]] = {"identity on a GPU, by size": _identity, "a kernel and its parts": _kernel}
