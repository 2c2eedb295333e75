"""One request as the model sees it: the same, whichever way its tensors come and go."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import DType
from ..errors import BatchSizeError, ClosedError, MissingTensorError, ModelError, TensorError
from ..spec import BATCH_CARRIER, ModelSpec
from ..view import TensorView
from .direct import PATH as DIRECT
from .direct import DirectPlan, DirectTensors, Output
from .plans import DirectRequest, OrdinaryRequest, Plans
from .triton import TritonBackend

__all__ = ["Call"]

TRITON: Final = "triton"


class Call:
    """One request. A context manager: leaving it commits the outputs; leaving it by an exception fails the request.

    An input lies in the client's memory if the request's descriptor says so, else in what Triton delivered. An output
    goes to the client's memory if the descriptor has room for it, else back through Triton. The model need not care.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    """

    __slots__ = (
        "_backend",
        "_delivered",
        "_direct",
        "_meaning",
        "_open",
        "_plans",
        "_request",
        "_requested",
        "_spec",
        "_written",
        "response",
    )

    def __init__(self, spec: ModelSpec, backend: TritonBackend, plans: Plans, request: Any) -> None:
        self.response: Any = None
        self._spec = spec
        self._backend = backend
        self._plans = plans
        self._request = request
        self._meaning: OrdinaryRequest | DirectRequest | None = None
        self._delivered: dict[str, Any] | None = None
        self._requested: Collection[str] | None = None
        self._written: dict[str, Output] = {}
        self._direct: DirectTensors | None = None
        self._open = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The request's parameters, without the descriptor. A copy."""
        return {} if self._meaning is None else dict(self._meaning.parameters)

    @property
    def path(self) -> str:
        """``"direct"`` if the request has a descriptor for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return DIRECT if isinstance(self._meaning, DirectRequest) else TRITON

    @property
    def inputs(self) -> dict[str, TensorView]:
        """Every input that the request has, in the order of the model's configuration."""
        found = {name: self._find_input(name) for name in self._spec.inputs}
        return {name: view for name, view in found.items() if view is not None}

    def input(self, name: str) -> TensorView:
        """Return one input: a view, C-contiguous and read-only.

        Raises
        ------
        MissingTensorError
            The request does not have it.
        """
        view = self._find_input(name)
        if view is None:
            self._spec.input(name)
            notice = self._meaning.notice if isinstance(self._meaning, OrdinaryRequest) else ""
            raise MissingTensorError(name, f"the request has no input {name!r}, which the model needs{notice}")
        return view

    def output(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TensorView:
        """Return memory for one output, to be filled before the call ends: C-contiguous, writable, not cleared.

        It is the client's own memory where the client provided enough for it.

        Raises
        ------
        ModelError
            The model's configuration has no such output, or not of this dtype and shape.
        """
        shape, dtype = tuple(shape), np.dtype(dtype)
        self._check_open()
        output = None if self._direct is None else self._direct.plan.known_output(name, shape, dtype)
        if output is None:
            output = self._make_output(name, shape, self._check_output(name, dtype, shape))
        self._written[name] = output
        return output.view

    def put(self, name: str, array: npt.NDArray[Any] | TensorView) -> None:
        """Give one output. One copy into the client's memory; none if the array is memory of this call already.

        An input, or a contiguous part of one, is passed through as it is: the client then sees the output where it
        wrote the input.

        Raises
        ------
        ModelError
            As for :meth:`output`.
        """
        self._check_open()
        source = array.numpy() if isinstance(array, TensorView) else np.asarray(array)
        dtype = self._check_output(name, source.dtype, source.shape)
        if self._direct is None:
            self._written[name] = _kept(name, source, dtype)
            return
        plan = self._direct.plan
        output = plan.pass_through(name, dtype, source)
        if output is None:
            output = plan.output(name, source.shape, dtype)
            if output is None:
                output = _kept(name, source, dtype)
            elif not _is_same_memory(output.view, source):
                np.copyto(output.view.numpy(), source)
        self._written[name] = output

    def requested(self, name: str) -> bool:
        """Return whether the client wants this output. Others need not be computed."""
        return name in self._requested_names()

    def __enter__(self) -> Call:
        self._meaning, generation = self._plans.begin(self._backend.parameters(self._request))
        if isinstance(self._meaning, DirectRequest):
            plan = self._meaning.direct
            try:
                self._check_batch_size(plan)
                self._direct = DirectTensors(plan, generation)
            except BaseException:
                self._plans.end(plan)
                raise
        self._open = True
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
            if self._direct is not None:
                self._plans.end(self._direct.plan)

    def _commit(self) -> None:
        outputs, tensors = [], []
        requested = self._requested_names()
        for name in self._spec.outputs:
            if name not in requested:
                continue
            output = self._written.get(name)
            if output is None:
                raise ModelError(f"output {name!r} was requested, but model.py wrote none")
            outputs.append(output)
            if output.place is None:
                tensors.append(self._backend.output(name, output.view.numpy()))
        response = self._backend.response(tensors)
        if self._direct is not None:
            self._direct.complete(outputs)  # last: from here on the memory may be the client's
        self.response = response

    def _requested_names(self) -> Collection[str]:
        if self._requested is None:
            self._requested = self._request.requested_output_names()
        return self._requested

    def _fail(self) -> None:
        if self._direct is not None:
            self._direct.fail()

    def _find_input(self, name: str) -> TensorView | None:
        self._check_open()
        if self._direct is not None:
            view = self._direct.plan.inputs.get(name)
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

    def _check_batch_size(self, direct: DirectPlan) -> None:
        """Raise unless the descriptor's inputs have as many rows as Triton's batcher was told."""
        if self._spec.max_batch_size == 0:
            return
        carrier = self._delivered_tensors().get(BATCH_CARRIER)
        batch_size = None if carrier is None else carrier.shape()[0]
        for name, view in direct.inputs.items():
            if view.shape[0] != batch_size:
                raise BatchSizeError(
                    name,
                    f"tensor {name!r} has a batch of {view.shape[0]}, but the request has {_batch(batch_size)}; "
                    f"send input {BATCH_CARRIER!r} with shape [{view.shape[0]}, 0]",
                )

    def _make_output(self, name: str, shape: tuple[int, ...], dtype: DType) -> Output:
        output = None if self._direct is None else self._direct.plan.output(name, shape, dtype)
        return output or _kept(name, np.empty(shape, dtype.numpy), dtype)

    def _check_output(self, name: str, numpy_dtype: np.dtype[Any], shape: tuple[int, ...]) -> DType:
        try:
            dtype = dtypes.from_numpy(numpy_dtype, name)
            self._spec.output(name).check(dtype, shape)
        except TensorError as error:
            raise ModelError(f"model.py wrote an output that it may not: {error}") from None
        return dtype

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this call")


def _batch(batch_size: int | None) -> str:
    return "none" if batch_size is None else f"one of {batch_size}"


def _kept(name: str, array: npt.NDArray[Any], dtype: DType) -> Output:
    """Return an output that goes back through Triton."""
    contiguous = np.ascontiguousarray(array).reshape(array.shape)  # the first makes a scalar one-dimensional
    return Output(TensorView(name, contiguous, dtype, TRITON))


def _is_same_memory(view: TensorView, source: npt.NDArray[Any]) -> bool:
    return bool(source.flags.c_contiguous) and view.numpy().ctypes.data == source.ctypes.data
