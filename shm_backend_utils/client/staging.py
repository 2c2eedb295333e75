"""Calls with tensors on GPUs whose way leads through the host: inputs are copied there, and outputs back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory.cuda.memory import CudaAccess
from ..memory.cuda.runtime import CudaRuntime, device_guard
from .device_sources import copy_on_device
from .exchange import Exchange
from .plan import CallPlan
from .result import Result
from .transport import Transport

__all__ = ["StagedExchange", "on_devices"]


class StagedExchange(Exchange):
    """Another exchange, on the host, in front of which some tensors are on GPUs.

    Parameters
    ----------
    plan : CallPlan
        Says which tensors are on which GPU.
    inner : Exchange
        Of the same call with all tensors on the host.
    """

    def __init__(self, transport: Transport, plan: CallPlan, inner: Exchange, cuda: CudaAccess) -> None:
        super().__init__(transport, plan, inner.options)
        self.path = inner.path
        self.memory = inner.memory
        self._inner = inner
        self._runtime = cuda.runtime
        self._input_devices = dict(plan.signature.input_devices)
        arrays: dict[str, Any] = dict(inner.inputs)
        for name, device in self._input_devices.items():
            arrays[name] = _empty_like(self._runtime, arrays[name], device)
        self.inputs: Mapping[str, Any] = MappingProxyType(arrays)

    def did_not_start(self, error: BaseException) -> bool:
        return self._inner.did_not_start(error)

    def close(self) -> None:
        super().close()
        self._inner.close()

    async def _infer(self, timeout_s: float) -> Result:
        for name, device in self._input_devices.items():
            copy_on_device(self._runtime, device, self._inner.inputs[name], self.inputs[name])
        return await self._inner.infer(timeout_s)


def on_devices(result: Result, devices: Iterable[tuple[str, int]], cuda: CudaAccess) -> Result:
    """Return a result whose outputs are on these GPUs: those that came back on the host are copied there."""
    arrays: dict[str, Any] = dict(result)
    for name, device in devices:
        array = arrays.get(name)
        if isinstance(array, np.ndarray):
            arrays[name] = _empty_like(cuda.runtime, array, device)
            copy_on_device(cuda.runtime, device, arrays[name], array)
    return Result(arrays, result.path, result.response, result.overflowed, result.bytes_avoided)


def _empty_like(runtime: CudaRuntime, array: npt.NDArray[Any], device: int) -> Any:
    with device_guard(runtime, device):
        return runtime.empty(array.shape, array.dtype)
