"""``ModelConfig``, which ``auto_complete_config`` completes."""

from __future__ import annotations

import json
from typing import Any

from .expecting import refused, same

IN = "in auto-complete-config function for model 'm'"
X = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}


def _config(pb_utils: Any, **more: Any) -> Any:
    return pb_utils.ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **more}))


def check_the_largest_batch_grows_alone(pb_utils: Any, request: Any) -> None:
    config = _config(pb_utils, max_batch_size=4)
    config.set_max_batch_size(8)
    same(config.as_dict()["max_batch_size"], 8)
    text = (
        "configuration specified max_batch_size 8, but in auto-complete-config function for model 'm' specified "
        "max_batch_size 2"
    )
    refused(ValueError, text, lambda: config.set_max_batch_size(2))


def check_requests_can_be_batched(pb_utils: Any, request: Any) -> None:
    config = _config(pb_utils)
    config.set_dynamic_batching()
    same(config.as_dict()["dynamic_batching"], {})
    config = _config(pb_utils, dynamic_batching={"max_queue_delay_microseconds": 5})
    config.set_dynamic_batching()
    same(config.as_dict()["dynamic_batching"], {"max_queue_delay_microseconds": 5})


def check_tensors_are_added_completed_and_said_again(pb_utils: Any, request: Any) -> None:
    config = _config(pb_utils, input=[{"name": "X", "data_type": "TYPE_INVALID", "dims": []}])
    for _ in range(2):
        config.add_input(X)
        config.add_output(X)
        same((config.as_dict()["input"], config.as_dict()["output"]), ([X], [X]))
    config.add_input({**X, "optional": True})
    config.add_input({**X, "name": "W"})
    same(config.as_dict()["input"], [{**X, "optional": True}, {**X, "name": "W"}])


def check_what_is_missing_unknown_or_otherwise_is_refused(pb_utils: Any, request: Any) -> None:
    config = _config(pb_utils, input=[dict(X)], output=[dict(X)])
    text = f"input 'X' {IN} contains property other than 'name', 'data_type', 'dims' and 'optional'."
    refused(ValueError, text, lambda: config.add_input({**X, "format": 1}))
    text = f"output 'X' {IN} contains property other than 'name', 'data_type' and 'dims'."
    refused(ValueError, text, lambda: config.add_output({**X, "optional": True}))
    refused(KeyError, "'name'", lambda: config.add_input({"format": 1}))
    dims = "model 'm', tensor 'X': the model expects dims [2, -1] but the model configuration specifies dims [1]"
    for side, add in (("input", config.add_input), ("output", config.add_output)):
        expects = f"configuration expects datatype TYPE_FP32 for {side} 'X', model provides TYPE_INT8"
        refused(ValueError, f"{side} {IN} is missing 'name' property.", add, {"dims": [1]})
        refused(ValueError, f"{side} 'X' {IN} is missing 'data_type' property.", add, {"name": "X", "dims": [1]})
        typed = {"name": "X", "data_type": "TYPE_FP32"}
        refused(ValueError, f"{side} 'X' {IN} is missing 'dims' property.", add, typed)
        refused(ValueError, f"unable to load model 'm', {expects}", add, {**X, "data_type": "TYPE_INT8"})
        refused(ValueError, dims, add, {**X, "dims": [2, -1]})


def check_a_model_may_be_decoupled(pb_utils: Any, request: Any) -> None:
    config = _config(pb_utils)
    config.set_model_transaction_policy({})
    same(config.as_dict()["model_transaction_policy"], {})
    config.set_model_transaction_policy({"decoupled": True})
    config.set_model_transaction_policy({"decoupled": True})
    same(config.as_dict()["model_transaction_policy"], {"decoupled": True})
    text = "trying to change decoupled property in auto-complete-config for model 'm', which is already set to 'True'."
    refused(ValueError, text, lambda: config.set_model_transaction_policy({"decoupled": False}))
