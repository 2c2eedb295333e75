"""Complete a model's configuration for the direct path while Triton loads the model."""

from __future__ import annotations

from typing import Any, Final

from ..errors import ModelError
from ..model_spec import BATCH_CARRIER, ModelSpec
from ..tensors.view import DIRECT

__all__ = ["auto_complete"]

_CARRIER: Final = {"name": BATCH_CARRIER, "data_type": "TYPE_UINT8", "dims": [-1], "optional": True}
_CARRIER_LINE: Final = f'{{ name: "{BATCH_CARRIER}" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }}'


def auto_complete(config: Any) -> Any:
    """Make a model's configuration one for the direct path. For ``TritonPythonModel.auto_complete_config``.

    Every input becomes optional, and the input ``SHM`` is added: it carries the batch size where the model has batches,
    and declares that the model serves every path. The parameter ``SHM_PATHS`` cannot be added from here: Triton 2.51
    takes over changes of inputs, outputs, ``max_batch_size``, dynamic batching and the transaction policy, and no
    others. Where ``config.pbtxt`` has the parameter, it decides: a model without batches then gets no
    ``SHM``, and one that is to serve no direct path is left as it is.

    Parameters
    ----------
    config : triton_python_backend_utils.ModelConfig
        Triton's object. It has all inputs and ``max_batch_size`` already, from ``config.pbtxt`` or added before.

    Returns
    -------
    triton_python_backend_utils.ModelConfig
        The same object, for Triton.

    Raises
    ------
    ModelError
        ``config.pbtxt`` contradicts: it has an input without ``optional: true``, or an ``SHM`` that is something else.
        The message says what to add or to remove.

    Examples
    --------
    A model that needs no ``config.pbtxt``::

        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(16)
            config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3, 224, 224]})
            config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [3, 224, 224]})
            return auto_complete(config)
    """
    spec = ModelSpec.from_config(config.as_dict())
    if spec.paths is not None and DIRECT not in spec.paths:
        return config
    if spec.max_batch_size > 0 or spec.paths is None:
        _add_carrier(config)
    for tensor in config.as_dict()["input"]:
        if "optional" not in tensor:
            config.add_input({name: tensor[name] for name in ("name", "data_type", "dims")} | {"optional": True})
    obstacle = ModelSpec.from_config(config.as_dict()).obstacle_in_inputs()
    if obstacle is not None:
        raise ModelError(f"{obstacle}, or remove it there and add it in auto_complete_config")
    return config


def _add_carrier(config: Any) -> None:
    described = config.as_dict()
    for tensor in described["input"]:
        if tensor["name"] == BATCH_CARRIER and any(tensor.get(name) != value for name, value in _CARRIER.items()):
            raise ModelError(
                f"input {BATCH_CARRIER!r} of model {described['name']!r} is {tensor['data_type']} {tensor['dims']}, "
                f"{'' if tensor.get('optional') else 'not '}optional, but this name is for the input that declares "
                f"the direct path; give it another name, or write {_CARRIER_LINE} in config.pbtxt"
            )
    config.add_input(dict(_CARRIER))
