"""The configuration of a model, as ``auto_complete_config`` completes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ModelConfig"]

_IN_AUTO_COMPLETE: Final = "in auto-complete-config function for model"
_REQUIRED: Final = ("name", "data_type", "dims")


class ModelConfig:
    """The configuration of a model, made from JSON, as ``auto_complete_config`` completes it."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as it is now; the very dict, not a copy."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set how many rows a batch has at most; ValueError if the configuration says more."""
        said = self._model_config["max_batch_size"]
        if said > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {said}, but {_IN_AUTO_COMPLETE} '{self._name}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have requests batched, from Triton 22.06 on; ValueError if the configuration names another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Describe an input by ``name``, ``data_type``, ``dims``, and maybe ``optional``.

        ValueError if it has other properties, or lacks one, or the configuration says otherwise.
        """
        self._add("input", input, (*_REQUIRED, "optional"), "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Describe an output by ``name``, ``data_type`` and ``dims``; ValueError as of :meth:`add_input`."""
        self._add("output", output, _REQUIRED, "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Say whether the model is ``decoupled``; from Triton 23.11 on.

        ValueError if the policy has other properties, or the configuration says otherwise.
        """
        if any(found != "decoupled" for found in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                "property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )

    @property
    def _name(self) -> str:
        name: str = self._model_config["name"]
        return name

    def _add(self, side: str, tensor: Mapping[str, Any], known: tuple[str, ...], named: str) -> None:
        if any(found not in known for found in tensor):
            raise ValueError(
                f"{side} '{tensor['name']}' {_IN_AUTO_COMPLETE} '{self._name}' contains property other than {named}."
            )
        for required in _REQUIRED:
            if required not in tensor:
                which = f"{side} '{tensor['name']}'" if "name" in tensor else side
                raise ValueError(f"{which} {_IN_AUTO_COMPLETE} '{self._name}' is missing '{required}' property.")
        for current in self._model_config[side]:
            if current["name"] == tensor["name"]:
                self._complete(side, current, tensor)
                return
        self._model_config[side].append(tensor)

    def _complete(self, side: str, current: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        if current["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {current['data_type']} for "
                f"{side} '{tensor['name']}', model provides {tensor['data_type']}"
            )
        if current["dims"] and current["dims"] != tensor["dims"]:
            self._refuse(current, tensor, "dims")
        if "optional" in tensor and current.get("optional", tensor["optional"]) != tensor["optional"]:
            self._refuse(current, tensor, "optional")
        current.update(tensor)

    def _refuse(self, current: Mapping[str, Any], tensor: Mapping[str, Any], what: str) -> None:
        raise ValueError(
            f"model '{self._name}', tensor '{tensor['name']}': the model expects {what} {tensor[what]} but the model "
            f"configuration specifies {what} {current[what]}"
        )
