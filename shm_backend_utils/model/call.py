"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import ClosedError, ModelError, TensorError
from ..spec import BATCH_CARRIER, ModelSpec
from ..view import TensorView
from .direct import PATH as DIRECT
from .direct import DirectTensors
from .triton import TritonBackend

__all__ = ["Call"]

TRITON: Final = "triton"


class Call:
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's descriptor says so, else in what Triton delivered. An output
    goes to the client's memory if the descriptor has room for it, else back through Triton. The model need not care.

    Attributes
    ----------
    parameters : dict
        The request's parameters, without the descriptor.
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    """

    __slots__ = (
        "_backend",
        "_delivered",
        "_direct",
        "_notice",
        "_open",
        "_request",
        "_requested",
        "_spec",
        "_written",
        "parameters",
        "response",
    )

    def __init__(
        self,
        spec: ModelSpec,
        backend: TritonBackend,
        request: Any,
        parameters: dict[str, Any],
        direct: DirectTensors | None,
        notice: str = "",
    ) -> None:
        self.parameters = parameters
        self.response: Any = None
        self._spec = spec
        self._backend = backend
        self._request = request
        self._direct = direct
        self._notice = notice
        self._delivered: dict[str, Any] | None = None
        self._requested: frozenset[str] | None = None
        self._written: dict[str, npt.NDArray[Any] | None] = {}
        self._open = True
        if direct is not None:
            self._check_inputs(direct)
            direct.begin()

    @property
    def path(self) -> str:
        """``"direct"`` if the request has a descriptor for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return TRITON if self._direct is None else DIRECT

    @property
    def inputs(self) -> dict[str, TensorView]:
        """Every input that the request has, in the order of the model's configuration."""
        found = {name: self._find_input(name) for name in self._spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    def input(self, name: str) -> TensorView:
        """Return one input: a view, C-contiguous and read-only.

        Raises
        ------
        TensorError
            The request does not have it.
        """
        view = self._find_input(name)
        if view is None:
            self._spec.input(name)
            raise TensorError(name, f"the request has no input {name!r}, which the model needs{self._notice}")
        return view

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output, to be filled before the call ends: C-contiguous, writable, not cleared.

        It is the client's own memory where the client provided enough for it.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        shape = tuple(shape)
        triton_dtype = self._check_output(name, dtype, shape)
        nbytes = math.prod(shape) * triton_dtype.itemsize
        if self._direct is not None:
            array = self._direct.output(name, triton_dtype, shape, nbytes)
            if array is not None:
                self._written[name] = None
                return TensorView(name, array, triton_dtype, DIRECT)
        array = np.empty(shape, triton_dtype.numpy)
        self._written[name] = array
        return TensorView(name, array, triton_dtype, TRITON)

    def put(self, name: str, array: npt.NDArray[Any] | TensorView) -> None:
        """Give one output. One copy into the client's memory; none if the array is memory of this call already.

        An input, or a contiguous part of one, is passed through as it is: the client then sees the output where it
        wrote the input.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        source = array.numpy() if isinstance(array, TensorView) else np.asarray(array)
        dtype = self._check_output(name, source.dtype, source.shape)
        if self._direct is not None:
            if self._direct.pass_through(name, dtype, source):
                self._written[name] = None
                return
            target = self._direct.output(name, dtype, source.shape, source.nbytes)
            if target is not None:
                self._written[name] = None
                if not _is_same_memory(target, source):
                    np.copyto(target, source)
                return
        self._written[name] = np.ascontiguousarray(source).reshape(source.shape)

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed."""
        if self._requested is None:
            self._requested = frozenset(self._request.requested_output_names())
        return name in self._requested

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._commit()
        except BaseException:
            self._fail()
            raise
        else:
            if error is not None:
                self._fail()
        finally:
            self._open = False

    def _commit(self) -> None:
        wanted = [name for name in self._spec.outputs if self.requested(name)]
        for name in wanted:
            if name not in self._written:
                raise ModelError(f"output {name!r} was requested, but model.py wrote none")
        written = {name: self._written[name] for name in wanted}
        tensors = [self._backend.output(name, kept) for name, kept in written.items() if kept is not None]
        if self._direct is not None:
            self._direct.complete(written)
        self.response = self._backend.response(tensors)

    def _fail(self) -> None:
        if self._direct is not None:
            self._direct.fail()

    def _find_input(self, name: str) -> TensorView | None:
        self._check_open()
        if self._direct is not None:
            view = self._direct.input(name)
            if view is not None:
                return view
        tensor = self._delivered_tensors().get(name)
        if tensor is None or name == BATCH_CARRIER:
            return None
        array = self._backend.input(tensor).view()
        array.flags.writeable = False
        return TensorView(name, array, dtypes.from_numpy(array.dtype, name), TRITON)

    def _delivered_tensors(self) -> dict[str, Any]:
        if self._delivered is None:
            self._delivered = {tensor.name(): tensor for tensor in self._request.inputs()}
        return self._delivered

    def _check_inputs(self, direct: DirectTensors) -> None:
        """Raise unless the descriptor's inputs are what Triton would have let through to this model."""
        batched = self._spec.max_batch_size > 0
        carrier = self._delivered_tensors().get(BATCH_CARRIER) if batched else None
        batch_size = None if carrier is None else carrier.shape()[0]
        for name, span in direct.descriptor.inputs.items():
            self._spec.input(name).check(span.dtype, span.shape)
            if batched and span.shape[0] != batch_size:
                raise TensorError(
                    name,
                    f"tensor {name!r} has a batch of {span.shape[0]}, but the request has {_batch(batch_size)}; "
                    f"send input {BATCH_CARRIER!r} with shape [{span.shape[0]}, 0]",
                )

    def _check_output(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> DType:
        self._check_open()
        try:
            triton_dtype = dtypes.from_numpy(dtype, name)
            self._spec.output(name).check(triton_dtype, shape)
        except TensorError as error:
            raise ModelError(f"model.py wrote an output that it may not: {error}") from None
        return triton_dtype

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this call")


def _batch(batch_size: int | None) -> str:
    return "none" if batch_size is None else f"one of {batch_size}"


def _is_same_memory(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> bool:
    return bool(source.flags.c_contiguous) and target.ctypes.data == source.ctypes.data
