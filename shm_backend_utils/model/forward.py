"""Calls from model to model on the same memory, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import ModelError
from ..model_spec import ModelSpec
from ..tensors.view import TensorView
from .device_arrays import DeviceArrays
from .direct import DirectPlan
from .direct_forwarding import DirectForwarding
from .forwarding import Forwarding, Given, OrdinaryForwarding, Outputs
from .lending import Lending
from .neighbours import Neighbours
from .scratch import Scratch
from .triton import TritonBackend

__all__ = ["CALLERS_PARAMETER", "Forwarder"]

CALLERS_PARAMETER: Final = "shm_callers"
"""The request parameter that names the models on whose behalf a model is called, with slashes between them."""


class Forwarder:
    """Makes the requests of one session to other models.

    Parameters
    ----------
    model : str
        The session's own.
    backend : TritonBackend
    arrays : DeviceArrays
    server_url : str
        Where the server tells what it knows of models.
    """

    def __init__(self, model: str, backend: TritonBackend, arrays: DeviceArrays, server_url: str) -> None:
        self._model = model
        self._backend = backend
        self._arrays = arrays
        self._neighbours = Neighbours(server_url)
        self._scratch = Scratch()
        self._learned: dict[tuple[str, str], int] = {}

    def begin(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Outputs,
        parameters: Mapping[str, Any],
        version: str,
        plan: DirectPlan | None,
        callers: str,
    ) -> Forwarding:
        """Return a request that is ready to be executed.

        The rest is as for ``call.forward``; ``plan`` is that of the request on whose behalf this one is made, if its
        client shares memory, and ``callers`` what that request said in :data:`CALLERS_PARAMETER`.

        Raises
        ------
        ModelError
            There is no such model, or it would wait for itself.
        TensorError
            It does not take these tensors.
        """
        chain = [*(callers.split("/") if callers else ()), self._model]
        if model in chain:
            raise ModelError(
                f"model {model!r} would be called on its own behalf ({' → '.join([*chain, model])}), and wait for "
                "itself for ever"
            )
        spec = self._neighbours.spec(model, version)
        given = {name: Given(name, value, self._arrays) for name, value in inputs.items()}
        extra = {**parameters, CALLERS_PARAMETER: "/".join(chain)}
        names = _names(model, spec, outputs)
        if spec is None or spec.is_decoupled or spec.obstacle_to_direct() is not None:
            return OrdinaryForwarding(model, version, self._backend, self._arrays, given, outputs, names, extra)
        hints = outputs if isinstance(outputs, Mapping) else {}

        def room(name: str, batch_size: int | None) -> int:
            hint, known = hints.get(name), spec.output(name).nbytes(batch_size)
            if isinstance(hint, int):
                return hint
            return self._learned.get((model, name), 0) if known is None else known

        return DirectForwarding(
            spec,
            version,
            self._backend,
            self._arrays,
            given,
            outputs,
            names,
            extra,
            room,
            Lending(plan, self._scratch),
            self._scratch,
        )

    def finish(self, forwarding: Forwarding, response: Any) -> dict[str, TensorView]:
        """Return the outputs, and learn how large they are; raises as :meth:`Forwarding.result`."""
        try:
            found = forwarding.result(response)
        except Exception:
            self._neighbours.forget(forwarding.model)  # maybe it is not what it was
            raise
        for name, byte_size in forwarding.overflowed.items():
            key = forwarding.model, name
            self._learned[key] = max(self._learned.get(key, 0), byte_size + byte_size // 8)
        return found

    def close(self) -> None:
        """Remove the scratch memory."""
        self._scratch.close()


def _names(model: str, spec: ModelSpec | None, outputs: Outputs) -> list[str]:
    if outputs is not None:
        return list(outputs)
    if spec is None:
        raise ModelError(f"the outputs of model {model!r} are not known here; name those that are wanted")
    return list(spec.outputs)
