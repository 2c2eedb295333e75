"""Functions and constants of the module, and the server's log."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import NUMBERS, named, refused, same

TYPES = ["bool_", *NUMBERS, "object_"]
PUBLIC = (
    "InferenceRequest InferenceResponse Logger MetricFamily ModelConfig PreferredMemory TRITONSERVER_MEMORY_CPU "
    "TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_REQUEST_FLAG_SEQUENCE_START "
    "TRITONSERVER_REQUEST_RELEASE_ALL TRITONSERVER_REQUEST_RELEASE_RESCHEDULE TRITONSERVER_RESPONSE_COMPLETE_FINAL "
    "TRITON_STRING_TO_NUMPY Tensor TritonError TritonModelException deserialize_bytes_tensor get_input_config_by_name "
    "get_input_tensor_by_name get_model_dir get_output_config_by_name get_output_tensor_by_name is_model_ready "
    "load_model numpy_to_triton_type serialize_byte_tensor triton_string_to_numpy triton_to_numpy_type unload_model "
    "using_decoupled_model_transaction_policy"
)


def check_the_module_has_these_names(pb_utils: Any, request: Any) -> None:
    found = [name for name in sorted(vars(pb_utils)) if name[0] != "_" and name not in ("json", "np", "struct")]
    same(found, PUBLIC.split())


def check_inputs_and_configurations_are_found_by_name(pb_utils: Any, request: Any) -> None:
    find = pb_utils.get_input_tensor_by_name
    same(find(request, "X").name(), "X")
    assert find(request, "Z") is None
    assert find(request, None) is None
    same(find(inference_request=request, name="X").shape(), named(request, "X").shape())
    x, y = {"name": "X", "dims": [1]}, {"name": "Y"}
    config = {"input": [{"name": "W"}, x], "output": [y]}
    assert pb_utils.get_input_config_by_name(config, "X") is x
    assert pb_utils.get_output_config_by_name(model_config=config, name="Y") is y
    assert pb_utils.get_input_config_by_name(config, "Y") is None
    assert pb_utils.get_output_config_by_name({}, "Y") is None


def check_a_configuration_says_whether_a_model_is_decoupled(pb_utils: Any, request: Any) -> None:
    asked = pb_utils.using_decoupled_model_transaction_policy
    assert asked({}) is False
    assert asked({"model_transaction_policy": {"decoupled": True}}) is True
    assert asked({"model_transaction_policy": {"decoupled": False}}) is False
    refused(KeyError, None, lambda: asked({"model_transaction_policy": {}}))


def check_types_by_number_and_by_the_configurations_name(pb_utils: Any, request: Any) -> None:
    for number, name in enumerate(TYPES, 1):
        assert pb_utils.triton_to_numpy_type(number) is getattr(np, name)
        same(pb_utils.numpy_to_triton_type(getattr(np, name)), number)
        same(pb_utils.numpy_to_triton_type(np.dtype(getattr(np, name))), number)
    for other in (0, 14, -1, "TYPE_FP32"):
        assert pb_utils.triton_to_numpy_type(other) is None
    same(pb_utils.numpy_to_triton_type(np.bytes_), 13)
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    find = pb_utils.triton_string_to_numpy
    same([find(f"TYPE_{name}") for name in ("BOOL", "FP16", "STRING")], [bool, np.float16, np.object_])
    for name in ("TYPE_BF16", "FP32", "TYPE_BYTES", ""):
        refused(KeyError, None, find, name)
    same(len(pb_utils.TRITON_STRING_TO_NUMPY), 13)


def check_a_model_knows_its_folder(pb_utils: Any, request: Any) -> None:
    from pathlib import Path

    folder = pb_utils.get_model_dir()
    assert type(folder) is str
    same((Path(folder) / "model.py").is_file(), True)
    same(Path(folder).name, "1")


def check_every_level_of_the_log_has_a_function_and_a_name(pb_utils: Any, request: Any) -> None:
    logger = pb_utils.Logger
    for write in (logger.log, logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
        assert write("a ü line") is None
        assert write(message="a line") is None
    for level in (logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE, logger.LogLevel.INFO):
        assert logger.log("a line", level) is None
        assert logger.log(message="a line", level=level) is None
