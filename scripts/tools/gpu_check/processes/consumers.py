"""What a model does with its tensors by an array library: takes them over by DLPack, on streams and in any type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.arrays.imported import imported
from shm_backend_utils.gpu.arrays.libraries import as_library

from ..gpu import Gpu

_STEPS_BEFORE: Final = 50  # so that who does not wait is too early

_REFUSED: Final[list[dict[str, Any]]] = [
    {"stream": 0},
    {"stream": -2},
    {"stream": "1"},
    {"stream": True},
    {"dl_device": (1, 0)},
    {"copy": True},
]


def hand_over(gpu: Gpu, x: DeviceArray, y: DeviceView) -> dict[str, Any]:
    """Write y on one stream, hand it to another by DLPack, read it there with no host waiting, and tell about that."""
    runtime, kernels, device = gpu.runtime, gpu.kernels, y.device
    first, second = runtime.create_stream(device), runtime.create_stream(device)
    target, scratch = (gpu.described(kernels.tensor(x.size, device)) for _ in range(2))
    with runtime.on(device):
        x.let_wait(first, device)
        for _ in range(_STEPS_BEFORE):
            runtime.copy(scratch.address, x.address, y.array.nbytes, first)
        runtime.copy(y.array.address, x.address, y.array.nbytes, first)
    written = DeviceArray(runtime, y.array.address, y.array.shape, y.array.dtype, device, y.array, written_on=first)
    consumed = imported(runtime, _ByDlpack(written), second)
    with runtime.on(device):
        runtime.copy(target.address, consumed.address, x.nbytes, second)
    runtime.synchronize_stream(second, device)
    return {
        "is_right": bool((gpu.download(target) == gpu.download(x)).all()),
        "is_same_memory": consumed.address == y.array.address,
        "device": y.__dlpack_device__(),
        "refused": [_refuses(lambda given=given: y.__dlpack__(**given)) for given in _REFUSED],  # type: ignore[misc]
        "accepted": [y.__dlpack__(stream=stream) is not None for stream in (None, -1, 1, 2)],
    }


def library_arrays(gpu: Gpu, x: DeviceArray, y: DeviceArray) -> dict[str, Any]:
    """Let the library copy x to y as arrays of its own, of whatever type, and tell which memory those had."""
    if gpu.kernels.name == "neither":
        gpu.kernels.quick(x, y, gpu.stream)
        gpu.runtime.synchronize_stream(gpu.stream, y.device)
        return {"is_same_memory": True, "type": "none"}
    source, target = as_library(x, gpu.kernels.name), as_library(y, gpu.kernels.name)
    addresses = [imported(gpu.runtime, array, gpu.stream).address for array in (source, target)]
    if gpu.kernels.name == "torch":
        target.copy_(source)
    else:
        target[...] = source
    return {"is_same_memory": addresses == [x.address, y.address], "type": str(target.dtype)}


class _ByDlpack:
    """An array as another library's, which has DLPack and nothing else."""

    def __init__(self, array: DeviceArray) -> None:
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__


def _refuses(export: Callable[[], object]) -> bool:
    try:
        export()
    except BufferError:
        return True
    return False
