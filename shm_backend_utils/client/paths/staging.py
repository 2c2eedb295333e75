"""Calls with tensors on GPUs whose way leads through the host: inputs are copied there, and outputs back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...memory.cuda.memory import CudaAccess
from ...memory.cuda.runtime import CudaRuntime, device_guard
from ..inputs.devices import copy_on_device
from ..inputs.sources import Source
from ..result import Result
from ..steps import Steps
from .exchange import Exchange

__all__ = ["StagedExchange", "on_devices"]


class StagedExchange(Exchange):
    """Another exchange, on the host, in front of which some inputs are on GPUs.

    Parameters
    ----------
    inner : Exchange
        Of the same call with all tensors on the host.
    input_devices : mapping of str to int
        Which inputs are on which GPU.
    cuda : CudaAccess
    """

    def __init__(self, inner: Exchange, input_devices: Mapping[str, int], cuda: CudaAccess) -> None:
        self.spec, self.layout, self.options = inner.spec, inner.layout, inner.options
        self.path = inner.path
        self._inner = inner
        self._runtime = cuda.runtime
        self._devices = dict(input_devices)
        self._arrays: dict[str, Any] = inner.arrays()
        for name, device in self._devices.items():
            self._arrays[name] = _empty_like(self._runtime, self._arrays[name], device)

    def arrays(self) -> dict[str, Any]:
        return dict(self._arrays)

    def write(self, given: Mapping[str, Source]) -> None:
        self._inner.write({name: source for name, source in given.items() if name not in self._devices})
        for name in self._devices:
            given[name].write_to(self._arrays[name])

    def sources(self) -> dict[str, Source]:
        return self._inner.sources()

    def did_not_start(self, error: BaseException) -> bool:
        return self._inner.did_not_start(error)

    def send(self, timeout_s: float) -> Steps[Result]:
        self._check_is_open()
        on_host = self._inner.arrays()
        for name, device in self._devices.items():
            copy_on_device(self._runtime, device, on_host[name], self._arrays[name])
        del on_host
        return (yield from self._inner.send(timeout_s))

    def close(self) -> None:
        super().close()
        self._inner.close()
        self._arrays = {}


def on_devices(result: Result, devices: Mapping[str, int], cuda: CudaAccess) -> Result:
    """Return a result whose outputs are on these GPUs: those that came back on the host are copied there."""
    arrays: dict[str, Any] = dict(result)
    for name, device in devices.items():
        array = arrays.get(name)
        if isinstance(array, np.ndarray):
            arrays[name] = _empty_like(cuda.runtime, array, device)
            copy_on_device(cuda.runtime, device, arrays[name], array)
    return Result(
        arrays, result.path, result.read_response, result.overflowed, result.bytes_avoided, result.in_response
    )


def _empty_like(runtime: CudaRuntime, array: npt.NDArray[Any], device: int) -> Any:
    with device_guard(runtime, device):
        return runtime.empty(array.shape, array.dtype)
