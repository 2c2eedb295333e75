"""Calls from model to model on the same memory, by the Python backend's business logic scripting (BLS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ....errors import ModelError
from ....model_spec import ModelSpec
from ...devices.arrays import DeviceArrays
from ...triton import TritonBackend
from .model_specs import ModelSpecs
from .ordinary import Forwarding, ForwardOutputs, Given, OrdinaryForwarding

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
        self._specs = ModelSpecs(server_url)

    def begin(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: ForwardOutputs,
        parameters: Mapping[str, Any],
        version: str,
        callers: str,
    ) -> Forwarding:
        """Return a request that is ready to be executed.

        The rest is as for ``call.forward``; ``callers`` is what the request on whose behalf this one is made said in
        :data:`CALLERS_PARAMETER`.

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
        spec = self._specs.spec(model, version)
        given = {name: Given(name, value, self._arrays) for name, value in inputs.items()}
        extra = {**parameters, CALLERS_PARAMETER: "/".join(chain)}
        names = _names(model, spec, outputs)
        return OrdinaryForwarding(model, version, self._backend, self._arrays, given, outputs, names, extra)

    def close(self) -> None:
        """Let go of what calls have needed. Twice is fine."""


def _names(model: str, spec: ModelSpec | None, outputs: ForwardOutputs) -> list[str]:
    if outputs is not None:
        return list(outputs)
    if spec is None:
        raise ModelError(f"the outputs of model {model!r} are not known here; name those that are wanted")
    return list(spec.outputs)
