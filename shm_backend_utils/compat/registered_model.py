"""A model registered as in triton-shm-client: with declared tensors, and a declared number of requests at once."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.utils import InferenceServerException

from .. import dtypes
from ..client.calls import infer
from ..client.core import ClientMemory, Core
from ..client.errors import ForkedError, InferenceError
from ..client.inputs.sources import Source
from ..client.options import RequestOptions
from ..client.paths.taking import take
from ..client.paths.triton_shm import InlineCall
from ..client.settings import CallSettings
from ..client.steps import BlockingDriver, Steps, Together, forget_locals
from ..client.transports.transport import Transport
from ..dtypes import BYTES
from ..errors import PeerError, ShmError, TensorNameError, TensorShapeError, TensorTypeError
from ..gpu.memory.access import CudaAccess
from ..memory.pool.inventory import Need, region_size
from ..memory.pool.options import PoolOptions
from ..process import Origin
from ..protocol.call_layout import aligned
from ..protocol.layout import MAX_RECORD_BYTE_SIZE, data_offset
from ..tensors.strings import Strings
from ..tensors.values import host_array

__all__ = ["InferShmError", "RegisteredModel", "Rows", "TensorDeclaration", "check_rows"]

TensorDeclaration = tuple[str, Sequence[int], npt.DTypeLike]
"""Name, shape of a row, dtype."""

_FOREVER_S: Final = 365 * 86400.0
_REGISTRATION_S: Final = 60.0
_NOT_LOADED: Final = ("StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE")
_NO_FIXED_SIZE: Final = "but strings have no fixed size; use ShmClient for them"


class InferShmError(InferenceError, RuntimeError):
    """A request of ``infer_shm`` failed; ``__cause__`` is the original error."""


class RegisteredModel:
    """A model with memory for ``pool_size`` requests at once, of up to ``max_batch_size`` rows; closes its transport.

    Shapes are those of a row. The memory never grows.
    """

    def __init__(
        self,
        transport: Transport,
        model_name: str,
        inputs: Sequence[TensorDeclaration],
        outputs: Sequence[TensorDeclaration],
        max_batch_size: int,
        pool_size: int,
    ) -> None:
        self.model_name = model_name
        self.max_batch_size = _positive("max_batch_size", max_batch_size)
        self.pool_size = _positive("pool_size", pool_size)
        self.inputs = _declared("input", inputs)
        for name, (_, dtype) in self.inputs.items():  # an output may be read as any dtype of fixed size
            if dtypes.from_numpy(dtype, name) is BYTES:
                raise TensorTypeError(name, f"input {name!r} is declared as {dtype}, {_NO_FIXED_SIZE}")
        self.outputs = _declared("output", outputs)
        tensors = (*self.inputs.values(), *self.outputs.values())
        rows = [math.prod(shape) * dtype.itemsize for shape, dtype in tensors]
        self._byte_size = sum(aligned(self.max_batch_size * byte_size) for byte_size in rows)
        self._permits = threading.BoundedSemaphore(self.pool_size)
        self._memory = ClientMemory(
            self,
            PoolOptions(
                # The size of a slot's record depends on the model, which may not be loaded yet.
                max_bytes=self.pool_size * region_size(Need(self._byte_size, 1, MAX_RECORD_BYTE_SIZE)),
                max_batch_bytes=0,
                idle_s=_FOREVER_S,
            ),
            CudaAccess(),
        )
        self._driver = BlockingDriver(transport, self.pool_size)
        self._core = Core(self._memory)
        self._core.connect(transport, inline_bytes=0)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._take_memory()
            on_error.pop_all()

    def infer(
        self,
        inputs: Mapping[str, npt.NDArray[Any] | list[Any]],
        client_timeout: float | None,
        options: RequestOptions,
    ) -> dict[str, npt.NDArray[Any]]:
        """Run the model on rows, in as many requests as that takes, and return new arrays."""
        if self._memory.pool.is_forked:  # threads of the parent, which do not run here, may hold permits for ever
            raise _as_infer_shm_error(ForkedError("this client"))
        row_count = self._checked(inputs)
        timeout_s = _FOREVER_S if client_timeout is None else min(float(client_timeout), _FOREVER_S)
        results = {name: np.empty((row_count, *shape), dtype) for name, (shape, dtype) in self.outputs.items()}
        origin = Origin.here("infer_shm")
        failure: dict[str, BaseException] = {}

        def one_request(begin: int) -> Steps[None]:
            rows = slice(begin, begin + self.max_batch_size)
            given = {name: Rows(name, data[rows], *self.inputs[name]) for name, data in inputs.items()}
            targets = {name: array[rows] for name, array in results.items()}
            with self._permits:
                if failure:
                    return
                deadline = time.monotonic() + timeout_s
                try:
                    yield from self._infer(self._settings(deadline, options, origin), given, targets)
                except BaseException as error:
                    forget_locals(error)
                    failure.setdefault("first", error)

        begins = range(0, row_count, self.max_batch_size)
        try:
            if len(begins) == 1 or options.get("sequence_id"):  # a sequence's requests must go one after another
                for begin in begins:
                    self._driver.run(one_request(begin))
            else:
                self._driver.run(_together([one_request(begin) for begin in begins]))
        except BaseException as error:  # an interrupt
            failure.setdefault("first", error)
        if failure:
            raise _as_infer_shm_error(failure.pop("first"))  # a variable would make a cycle with the error's frames
        return results

    def abandon(self) -> bool:
        """Remove the memory, from a finalizer; return whether a registration stays until :meth:`close`."""
        self._memory.abandon()
        self._driver.abandon()
        return not self._core.registrations.is_empty

    def close(self) -> None:
        """Remove the memory, and unregister it at the server. Twice is fine."""
        if not self._memory.pool.is_forked:
            self._driver.run(self._core.close())
            self._driver.close()
        self._memory.end()

    def _settings(self, deadline: float, options: RequestOptions, origin: Origin) -> CallSettings:
        return CallSettings(self.model_name, options.get("model_version", ""), "auto", deadline, options, origin)

    def _infer(
        self, settings: CallSettings, given: Mapping[str, Rows], targets: Mapping[str, npt.NDArray[Any]]
    ) -> Steps[None]:
        hints = {name: array.nbytes for name, array in targets.items()}
        with (yield from infer(self._core, settings, given, hints or None)) as result:
            for name, target in targets.items():
                _put(name, result[name], target)

    def _take_memory(self) -> None:
        """Make all slots, so that a lack of memory shows now."""
        settings = self._settings(
            time.monotonic() + _REGISTRATION_S, RequestOptions(), Origin.here("register_shm_model")
        )
        self._driver.run(self._core.check_server_answers(settings.deadline))
        try:
            known = self._driver.run(self._core.known_model(settings))
        except InferenceError as error:
            if error.status() not in _NOT_LOADED:
                raise
            return  # the model may be loaded later
        path = self._driver.run(self._core.paths.choose(known, "auto", settings.deadline))
        if path != InlineCall.path:
            end = data_offset(1, known.record_byte_size) + self._byte_size
            taken = [
                self._driver.run(take(self._core.pool, settings, known, end, 1, path)) for _ in range(self.pool_size)
            ]
            taken.clear()  # this gives the regions back, and the pool keeps them

    def _checked(self, inputs: Mapping[str, npt.NDArray[Any] | list[Any]]) -> int:
        """Return the number of rows, after all checks that are possible before anything is sent."""
        lengths = {name: _length(name, data) for name, data in inputs.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"inputs of model {self.model_name!r} must have the same number of rows; found {lengths}")
        row_count = next(iter(lengths.values()))
        if row_count == 0:
            return 0  # without rows, nothing can be wrong
        for name, data in inputs.items():
            if name not in self.inputs:
                known = ", ".join(self.inputs)
                raise TensorNameError(name, f"model {self.model_name!r} was registered without input {name!r}: {known}")
            if not isinstance(data, np.ndarray | list):
                raise TensorTypeError(
                    name, f"input {name!r} is a {type(data).__name__}; expected a NumPy array, or a list of rows"
                )
            for each in [data] if isinstance(data, np.ndarray) else data:
                if isinstance(each, np.ndarray):
                    host_array(name, each)  # NumPy would drop a mask
            check_rows(name, data, self.inputs[name][0], self.max_batch_size)
        return row_count


class Rows(Source):
    """Some rows of one input, cast and broadcast to the declared dtype and shape like ``target[i] = row`` in NumPy."""

    __slots__ = ("_data",)

    def __init__(
        self, name: str, data: npt.NDArray[Any] | list[Any], row_shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        shape = (len(data), *row_shape)
        super().__init__(dtypes.from_numpy(dtype, name), shape, math.prod(shape) * dtype.itemsize, ())
        self._data = data

    def write_to(self, target: npt.NDArray[Any]) -> None:
        """Assign the rows; raises NumPy's error for values that cannot be cast."""
        if isinstance(self._data, np.ndarray):
            target[...] = self._data
        else:
            # Assigning row by row saves the copy that stacking would make. The dots make even one element an array:
            # without the dots, only some versions of NumPy assign an array of one element to it.
            for index, row in enumerate(self._data):
                target[index, ...] = row


def _length(name: str, data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise TensorTypeError(
            name, f"input {name!r} is a {type(data).__name__} without rows; expected a NumPy array, or a list of rows"
        ) from None


def check_rows(name: str, data: Sequence[Any] | npt.NDArray[Any], row_shape: tuple[int, ...], count: int) -> None:
    """Raise TensorShapeError unless ``count`` rows at a time can be assigned to rows of this shape."""
    if isinstance(data, np.ndarray):
        counts = {min(count, len(data)), len(data) % count or count}
        assigned = [((rows, *data.shape[1:]), (rows, *row_shape), True) for rows in counts]
    else:
        assigned = [(np.shape(row), row_shape, hasattr(row, "shape")) for row in data]
    for shape, wanted, is_array in assigned:
        significant = shape
        # NumPy drops leading dimensions of 1, but only of arrays.
        while is_array and len(significant) > len(wanted) and significant[0] == 1:
            significant = significant[1:]
        padded = (1,) * (len(wanted) - len(significant)) + significant
        if len(padded) != len(wanted) or any(size not in (1, want) for size, want in zip(padded, wanted, strict=True)):
            raise TensorShapeError(
                name, f"input {name!r} has shape {list(shape)}, which does not fit the registered shape {list(wanted)}"
            )


def _together(operations: list[Steps[None]]) -> Steps[None]:
    yield Together(operations, time.monotonic() + _FOREVER_S)


def _positive(what: str, value: int) -> int:
    if operator.index(value) <= 0:
        raise ValueError(f"{what} must be greater than 0; found {value}")
    return operator.index(value)


def _declared(what: str, tensors: Sequence[TensorDeclaration]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype by name."""
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for name, given_shape, given_dtype in tensors:
        shape, dtype = tuple(operator.index(size) for size in given_shape), np.dtype(given_dtype)
        if name in found:
            raise ValueError(f"{what} {name!r} is declared twice")
        if any(size <= 0 for size in shape):
            raise ValueError(f"{what} {name!r} is declared with shape {list(shape)}; expected dimensions above 0")
        if dtype.hasobject or dtype.itemsize == 0:
            raise TensorTypeError(name, f"{what} {name!r} is declared as {dtype}, {_NO_FIXED_SIZE}")
        found[name] = shape, dtype
    return found


def _put(name: str, array: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy an output into its target, and zeros behind it; PeerError if the output has more bytes than declared."""
    if array.dtype.hasobject:
        array = Strings.of(name, array).encoded
    if array.shape == target.shape and array.dtype == target.dtype:
        target[...] = array
    elif array.nbytes > target.nbytes:
        raise PeerError(
            f"output {name!r} is {array.dtype} of shape {list(array.shape)}, but was registered as {target.dtype}, "
            f"which makes {list(target.shape)} for these rows"
        )
    elif (
        array.dtype == target.dtype
        and array.ndim == target.ndim
        and all(size <= room for size, room in zip(array.shape, target.shape, strict=True))
    ):
        target[...] = 0
        target[tuple(slice(size) for size in array.shape)] = array
    else:
        room = _bytes_of(target)
        room[: array.nbytes] = _bytes_of(array)
        room[array.nbytes :] = 0


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_infer_shm_error(error: BaseException) -> BaseException:
    if not isinstance(error, ShmError):
        return error
    text, status = (error.message(), error.status()) if isinstance(error, InferenceServerException) else (error, None)
    failure = InferShmError(f"a request of infer_shm failed: {text}", status)
    failure.__cause__ = error
    return failure
