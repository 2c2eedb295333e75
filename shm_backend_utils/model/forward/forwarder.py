"""Calls from model to model on the same memory, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

import urllib.error
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from operator import index
from typing import Any, Final
from urllib.parse import quote

from ...errors import BudgetError, CallerError, MachineError, ModelError, NoSharedMemoryError, PeerError, shown
from ...gpu.arrays.device_view import DeviceView
from ...gpu.instance import InstanceGpus
from ...gpu.uses import DeviceUses
from ...http.questions import fetch_json
from ...memory.pool.options import PoolOptions
from ...memory.pool.pool import SlotPool
from ...model_spec import ModelSpec, output_names
from ...protocol.call_layout import LearnedSizes, lay_out
from ...protocol.parameters import DESCRIPTOR_PARAMETER, GENERATION_PARAMETER, SLOT_PARAMETER
from ...tensors.view import TensorView
from ..triton import TritonBackend
from .direct import DirectForwarding, Lending, LentMemory
from .ordinary import Asked, Forwarding, ForwardOutputs, Given, OrdinaryForwarding, OtherModel

__all__ = ["CALLERS_PARAMETER", "Forwarder", "ModelSpecs", "check_all_are_over"]

_TIMEOUT_S: Final = 5.0


class ModelSpecs:
    """The configurations of other models, from the HTTP endpoint, cached until :meth:`forget`."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._known: dict[tuple[str, str], OtherModel] = {}

    def model(self, model: str, version: str) -> OtherModel | None:
        """Return a model with its configuration; None if the server's HTTP endpoint is unknown or does not answer."""
        key = (model, version)
        known = self._known.get(key)
        if known is None:
            spec = self._ask(model, version)
            if spec is None:  # the server may answer the next time
                return None
            known = self._known[key] = OtherModel(spec)
        return known

    def forget(self, model: str) -> None:
        """Ask the server again the next time: the model may have another configuration by now."""
        self._known = {key: known for key, known in self._known.items() if key[0] != model}

    def _ask(self, model: str, version: str) -> ModelSpec | None:
        place = quote(model, safe="") + (f"/versions/{quote(version, safe='')}" if version else "")
        try:
            return ModelSpec.of_server(model, fetch_json(f"{self._server_url}/v2/models/{place}/config", _TIMEOUT_S))
        except urllib.error.HTTPError as error:
            with error:
                raise ModelError(f"model {model!r} cannot be called: the server has no such model ready") from None
        except (OSError, HTTPException, ValueError, PeerError):
            return None


_KEEPS_FAILING: Final = 3
CALLERS_PARAMETER: Final = "shm_callers"
"""The request parameter with the chain of models that called each other to make this request, joined by slashes."""
_OURS: Final = frozenset({SLOT_PARAMETER, GENERATION_PARAMETER, DESCRIPTOR_PARAMETER, CALLERS_PARAMETER})

_HEAD_ROOM: Final = 1.125


class Forwarder:
    """Makes the requests of one session to other models; tensors of up to ``inline_bytes`` in total go in band."""

    def __init__(
        self, model: str, backend: TritonBackend, arrays: InstanceGpus, server_url: str, inline_bytes: int = 0
    ) -> None:
        self._model = model
        self._backend = backend
        self._arrays = arrays
        self._specs = ModelSpecs(server_url)
        self._inline_bytes = inline_bytes
        self._pool = SlotPool(PoolOptions(region="system"))
        self._failures: deque[str] = deque(maxlen=_KEEPS_FAILING)  # messages since the last call that found memory
        self._learned: dict[str, LearnedSizes] = {}  # by model

    def begin(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs,
        parameters: Mapping[str, Any],
        version: str,
        callers: str,
        own: Callable[[], Sequence[LentMemory | None]],
        uses: DeviceUses | None = None,
    ) -> Forwarding:
        """Return a request to execute.

        ``callers`` is the chain of models so far, ``own`` finds the regions to lend, and copies are in the order that
        ``uses`` of the calling call has.
        """
        if parameters and (ours := _OURS & parameters.keys()):
            raise ModelError(f"parameter {min(ours)!r} is written by the session itself; leave it out")
        chain = f"{callers}/{self._model}" if callers else self._model
        if model in chain.split("/"):
            raise ModelError(
                f"model {model!r} would be called on its own behalf ({chain.replace('/', ' → ')} → {model}), and wait "
                "for itself for ever; call a model that does not call this one"
            )
        other = self._specs.model(model, version)
        spec = None if other is None else other.spec
        if spec is not None and spec.is_decoupled:
            # With exec(decoupled=True), Triton 2.51 hangs if the first response is an error, and loses later errors.
            raise ModelError(
                f"model {model!r} is decoupled: it answers with any number of responses, and Triton hides its errors "
                "from a model that calls it; let the client call it (ShmClient.stream), or give it a version that "
                "answers once"
            )
        given = {}
        for name, value in inputs.items():
            given[name] = Given(spec, name, value, self._arrays, uses)
        hints: Mapping[str, Any] = outputs if type(outputs) is dict or isinstance(outputs, Mapping) else {}
        names = _names(model, spec, outputs, hints)
        sent = {**parameters, CALLERS_PARAMETER: chain}
        asked = Asked(model, version, other, given, hints, names, sent, uses)
        if other is None or not other.maps_memory:
            return OrdinaryForwarding(asked, self._backend, self._arrays)
        sizes = self._learned.get(model)
        learned: Mapping[str, int] = {} if sizes is None else sizes.per_row
        if other.takes_in_band:
            rows = self._rows_in_band(asked, other.spec, learned)
            if rows is not None:
                in_band = OrdinaryForwarding(asked, self._backend, self._arrays, self._inline_bytes)
                in_band.rows = rows
                return in_band
        make, lent = partial(self._begin_direct, asked, learned), own()
        try:
            forwarding = make(Lending(lent, self._pool))
        except (BudgetError, NoSharedMemoryError):
            if not any(learned.get(name) for name in names):
                raise  # otherwise learned sizes may be too large: try without them, and let outputs overflow
            make = partial(self._begin_direct, asked, {})
            forwarding = make(Lending(lent, self._pool))
        forwarding.again = partial(make, Lending(None, self._pool))
        return forwarding

    def execute(self, forwarding: Forwarding, pending: set[Forwarding]) -> dict[str, TensorView]:
        """Execute a request and return the outputs; a request that is interrupted stays in ``pending``."""
        pending.add(forwarding)
        try:
            response = forwarding.request.exec()
        except Exception:
            forwarding.give_up()  # in case Triton executes the request later after all
            pending.discard(forwarding)
            raise
        pending.discard(forwarding)
        other = self._again(forwarding, response) if type(forwarding) is DirectForwarding else None
        return self.finish(forwarding, response) if other is None else self.execute(other, pending)

    async def execute_async(self, forwarding: Forwarding, pending: set[Forwarding]) -> dict[str, TensorView]:
        """Do the same without blocking the event loop."""
        pending.add(forwarding)
        try:
            response = await forwarding.request.async_exec()
        except Exception:
            forwarding.give_up()  # in case Triton executes the request later after all
            pending.discard(forwarding)
            raise
        pending.discard(forwarding)
        other = self._again(forwarding, response) if type(forwarding) is DirectForwarding else None
        return self.finish(forwarding, response) if other is None else await self.execute_async(other, pending)

    def finish(self, forwarding: Forwarding, response: Any) -> dict[str, TensorView]:
        """Return the outputs and learn their sizes; raises as :meth:`Forwarding.result`."""
        try:
            found = forwarding.result(response)
        except Exception:
            forwarding.give_up()  # after an error of Triton itself, the other model may still execute the request
            self._specs.forget(forwarding.model)  # the other model's configuration may have changed
            raise
        if forwarding.overflowed or forwarding.model in self._learned:
            learned, rows = self._learned.setdefault(forwarding.model, LearnedSizes(_HEAD_ROOM)), forwarding.rows
            if forwarding.overflowed:
                learned.learn(forwarding.overflowed, rows)
            else:
                learned.needed.append(sum(view.attributes.byte_size for view in found.values()) / rows)
            if learned.shrink():
                self._pool.drop_idle()
        return found

    def check_has_memory(self) -> None:
        """Raise MachineError if the last calls have all failed for lack of memory."""
        if len(self._failures) == _KEEPS_FAILING:
            raise MachineError(
                f"the last {_KEEPS_FAILING} calls of other models (call.forward) failed for lack of shared memory: "
                f"{self._failures[-1]}"
            )

    def _rows_in_band(self, asked: Asked, spec: ModelSpec, learned: Mapping[str, int]) -> int | None:
        """Return the rows of a request that can go in band; None if tensors are too large, strings, or on a GPU."""
        given, most = asked.inputs, spec.max_batch_size
        rows: int | None = None
        byte_size, fits = 0, True
        for each in given.values():
            if not each.is_plain:
                return None
            byte_size += each.byte_size
            if most:
                fits = fits and rows in (None, each.shape[0])
                rows = each.shape[0]
        if not fits or (most and not (rows and rows <= most)):
            lay_out(spec, given, {}, 0, learned={}, most_rows=most)  # raises the error that says which tensor is wrong
        rows = rows or 1
        for name in asked.names:
            tensor, hint = spec.outputs.get(name) or spec.output(name), asked.hints.get(name)
            if isinstance(hint, DeviceView):
                return None
            if hint is not None and not isinstance(hint, TensorView):
                byte_size += index(hint)
            else:
                row_byte_size = learned.get(name, 0) if tensor.row_byte_size is None else tensor.row_byte_size
                byte_size += row_byte_size * rows
        return rows if byte_size <= self._inline_bytes else None

    def _begin_direct(self, asked: Asked, learned: Mapping[str, int], lending: Lending) -> DirectForwarding:
        try:
            return DirectForwarding(asked, self._backend, self._arrays, learned, lending)
        except (MachineError, OSError) as error:
            self._failures.append(str(error))
            raise

    def _again(self, forwarding: DirectForwarding, response: Any) -> Forwarding | None:
        """Return the request in other memory if the other model could not open this memory; else None."""
        lost = forwarding.spoil_lost_memory(response)
        if not lost:
            self._failures.clear()
        elif forwarding.again is not None:
            return forwarding.again()
        else:
            self._failures.append(lost)
        return None

    def close(self) -> None:
        """Remove this model's own regions. Arrays over them stay valid. Twice is fine."""
        self._pool.close()


def check_all_are_over(pending: Collection[Forwarding]) -> None:
    """Raise ModelError if other models may still work for a call that ends."""
    if pending:
        raise ModelError(
            f"model.py has left the call while {len(pending)} calls of other models were under way or interrupted; "
            "await them before the call ends"
        )


def _names(model: str, spec: ModelSpec | None, outputs: ForwardOutputs, hints: Mapping[str, Any]) -> Sequence[str]:
    if outputs is None:
        if spec is None:
            raise ModelError(
                f"the outputs of model {model!r} are not known here, as the server's HTTP endpoint is unknown or silent"
                "; name the outputs, or set the parameter SHM_SERVER_URL in config.pbtxt to http://HOST:PORT"
            )
        return list(spec.outputs)
    try:
        names = output_names(outputs)
        for name, hint in hints.items():
            if not (hint is None or isinstance(hint, TensorView) or (hasattr(hint, "__index__") and index(hint) >= 0)):
                expected = "a view that call.output has returned, a number of bytes, or None"
                raise CallerError(f"outputs has {shown(hint)} for {name!r}; expected {expected}")
    except CallerError as error:
        raise ModelError(f"model {model!r} cannot be called with these outputs: {error}") from None
    return names
