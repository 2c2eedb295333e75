"""ShmClient: inference whose tensors stay in shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..descriptor import GENERATION_PARAMETER, PARAMETER
from ..errors import CallerError, ClosedError
from ..region import reaper
from ..region.system import PRIVATE, Access
from ..spec import ModelSpec
from .call import OutputHint, PreparedCall, plan
from .errors import InferenceError, ServerUnavailableError
from .pool import SlotPool
from .result import Result
from .transport import Request, Transport, connect

__all__ = ["ShmClient"]


class ShmClient:
    """A client of one server on this machine. A context manager. May be used from several threads.

    Making one removes what this user's clients have left in shared memory when they were killed.

    Parameters
    ----------
    url : str
        ``HOST:PORT`` or ``grpc://HOST:PORT`` for gRPC, ``http://HOST:PORT`` for HTTP.
    timeout_s : float
        How long to wait for an answer, where a call does not say otherwise.
    access : Access
        Who may open the shared memory; by default this user alone. A server that runs as another user needs, for
        example, ``Access(mode=0o660, group_id=...)``, and this user's id in the model's ``SHM_ALLOWED_UIDS``.
    prefault : bool
        Whether to enter new shared memory into this process' page tables at once, not page by page at first use.

    Raises
    ------
    ServerUnavailableError
        No server answers there.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0, access: Access = PRIVATE, prefault: bool = False) -> None:
        if timeout_s <= 0:
            raise CallerError(f"timeout_s is {timeout_s}; expected a number of seconds above 0")
        self._timeout_s = timeout_s
        self._specs: dict[tuple[str, str], ModelSpec] = {}
        self._learned: dict[str, dict[str, int]] = {}
        self._transport: Transport | None = connect(url, timeout_s)
        reaper.reap()
        self._pool = SlotPool(access, prefault=prefault)
        self._finalizer = weakref.finalize(self, SlotPool.close, self._pool)  # also when the interpreter exits
        try:
            self._check_server_answers(self._transport)
        except BaseException:
            self.close()
            raise

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] | Mapping[str, OutputHint] | None = None,
        timeout_s: float | None = None,
        model_version: str = "",
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Copy the inputs into shared memory, run the model, and return its outputs as views: one copy in, none out.

        Parameters
        ----------
        model : str
            Its configuration must declare the direct path.
        inputs : mapping of str to array_like
            In any memory order; the dtypes must be the model's.
        outputs : sequence of str or mapping, optional
            The outputs wanted, all if not given. A mapping also says how much room each needs, as bytes or as
            ``(shape, dtype)``. Where neither this nor the configuration tells, the size is learned from the first call,
            whose output comes back through Triton.
        timeout_s : float, optional
            How long to wait for the answer.
        model_version, request_id, parameters
            As for ``tritonclient``.

        Raises
        ------
        TensorError
            The model does not take these tensors.
        CallerError
            The model cannot be called on the direct path; the message says what to do.
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        MachineError
            The machine has not enough shared memory left.
        """
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        with self.prepare(
            model,
            shapes,
            outputs=outputs,
            model_version=model_version,
            request_id=request_id,
            parameters=parameters,
        ) as call:
            for name, array in arrays.items():
                np.copyto(call.inputs[name], array, casting="no")
            return call.infer(timeout_s=timeout_s)

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]],
        *,
        outputs: Sequence[str] | Mapping[str, OutputHint] | None = None,
        model_version: str = "",
        request_id: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> PreparedCall:
        """Return a call whose inputs are to be filled in place: no copy at all.

        ``inputs`` maps names to ``(shape, dtype)``; the rest is as for :meth:`infer`, which see.
        """
        transport = self._connected()
        for name in (PARAMETER, GENERATION_PARAMETER):
            if parameters and name in parameters:
                raise CallerError(f"parameter {name!r} is written by ShmClient; leave it out")
        spec = self._spec(transport, model, model_version)
        learned = self._learned.setdefault(model, {})
        call_plan = plan(spec, inputs, outputs, learned)

        def request(timeout_s: float | None, descriptor: dict[str, Any]) -> Request:
            return Request(
                model=model,
                batch_size=call_plan.batch_size,
                outputs=call_plan.requested,
                parameters={**(parameters or {}), **descriptor},
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                options={"model_version": model_version, "request_id": request_id},
            )

        return PreparedCall(call_plan, self._pool, transport, request, learned.update)

    def close(self) -> None:
        """Close the connection and remove the shared memory. Arrays of results stay valid. Twice is fine."""
        self._finalizer()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def __enter__(self) -> ShmClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> Transport:
        if self._transport is None:
            raise ClosedError("this client")
        return self._transport

    def _spec(self, transport: Transport, model: str, version: str) -> ModelSpec:
        spec = self._specs.get((model, version))
        if spec is None:
            spec = ModelSpec.from_config(transport.model_config(model, version))
            obstacle = spec.obstacle_to_direct()
            if obstacle is not None:
                raise CallerError(obstacle)
            self._specs[model, version] = spec
        return spec

    @staticmethod
    def _check_server_answers(transport: Transport) -> None:
        try:
            transport.model_config("")
        except ServerUnavailableError:
            raise
        except InferenceError:
            pass  # it has no model of that name, but it is there
