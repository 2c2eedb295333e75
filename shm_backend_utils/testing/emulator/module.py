"""The module that ``import triton_python_backend_utils`` gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np

from .host import Faults, Host, asked
from .metrics import MetricFamily
from .pybind import NumberedEnum, TritonError, TritonModelException, refuse, text, truth
from .request import InferenceRequest, MemoryType, PreferredMemory
from .response import InferenceResponse
from .tensor import Tensor, deserialize_bytes_tensor, serialize_byte_tensor

__all__ = ["NAME", "Logger", "ModelConfig", "backend_module", "get_input_tensor_by_name"]

TRITON_STRING_TO_NUMPY: Final[dict[str, Any]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""NumPy's types by the configuration's names; BF16 has none."""

_BY_NUMBER: Final[Mapping[int, Any]] = MappingProxyType(
    dict(enumerate((np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]), 1))
)

_IN_AUTO_COMPLETE: Final = "in auto-complete-config function for model"
_REQUIRED: Final = ("name", "data_type", "dims")


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request; None if it has none of this name."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response; None if it has none of this name."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input's entry in a model's configuration; None without such an input."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output's entry in a model's configuration; None without such an output."""
    return _named(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration says that it is decoupled."""
    policy: Mapping[str, bool] = model_config.get("model_transaction_policy", {"decoupled": False})
    return policy["decoupled"]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return NumPy's type for the number of one of Triton's; None without a counterpart."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number of Triton's type for one of NumPy's; None without a counterpart."""
    found = next((number for number, numpy in _BY_NUMBER.items() if data_type == numpy), None)
    return 13 if found is None and data_type == np.bytes_ else found


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return NumPy's type for one of the configuration's names; raises KeyError without a counterpart."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def _named(model_config: Mapping[str, Any], side: str, name: str) -> dict[str, Any] | None:
    return next((found for found in model_config.get(side, ()) if found["name"] == name), None)


class LogLevel(NumberedEnum):
    """The severity of a line of the log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_Level = LogLevel


class Logger:
    """The server's log, from Triton 22.09 on. Lines have the place in model.py where they were written."""

    _host: Host

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.Logger: No constructor defined!")

    LogLevel: Final = _Level
    INFO: Final = _Level.INFO
    WARNING: Final = _Level.WARNING
    ERROR: Final = _Level.ERROR
    VERBOSE: Final = _Level.VERBOSE

    @classmethod
    def log(cls, message: str, level: _Level = _Level.INFO) -> None:
        """Write a line."""
        if not isinstance(level, _Level):
            refuse("log", "level", level, "a LogLevel")
        cls._host.log(level.name, text("log", "message", message))

    @classmethod
    def log_info(cls, message: str) -> None:
        """Write a line of information."""
        cls._host.log("INFO", text("log_info", "message", message))

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Write a warning."""
        cls._host.log("WARNING", text("log_warn", "message", message))

    @classmethod
    def log_error(cls, message: str) -> None:
        """Write an error."""
        cls._host.log("ERROR", text("log_error", "message", message))

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Write a line that is seen with ``--log-verbose`` alone."""
        cls._host.log("VERBOSE", text("log_verbose", "message", message))


class ModelControl:
    """A model's control over the other models of its server."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def load_model(self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, with a configuration as JSON, and files by ``"file:..."``, if given; from Triton 23.07 on."""
        name = text("load_model", "model_name", model_name)
        config = text("load_model", "config", config)
        if files is not None and not isinstance(files, dict):
            raise TritonModelException(
                f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
            )
        contents = {}
        for path, content in (files or {}).items():
            if not isinstance(path, str | bytes):
                raise RuntimeError(f"Unable to cast Python instance to C++ type: the file {path!r} is named by no str")  # noqa: TRY004  # as the stub does
            if not isinstance(content, bytes):
                refuse("load_model", "files", content, "bytes")
            contents[text("load_model", "files", path)] = content
        asked(self._host, "Failed to load model", lambda: self._host.load_model(name, config, contents))

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Unload a model, and maybe those that it depends on; from Triton 23.07 on."""
        name = text("unload_model", "model_name", model_name)
        with_dependents = truth("unload_model", "unload_dependents", unload_dependents)
        asked(
            self._host, "Failed to unload model", lambda: self._host.unload_model(name, with_dependents=with_dependents)
        )

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Return whether a model can execute requests; from Triton 23.07 on."""
        name = text("is_model_ready", "model_name", model_name)
        version = text("is_model_ready", "model_version", model_version)
        return asked(
            self._host, "Failed to check model readiness", lambda: self._host.is_model_ready(name, _checked(version))
        )


def _checked(version: str) -> str:
    """Return a version; C++ reads the number that it begins with."""
    if not version:
        return version
    digits = version.strip()
    sign = digits[:1] in ("+", "-")
    end = next((i for i, c in enumerate(digits) if not (c.isdigit() or (i == 0 and sign))), len(digits))
    try:
        number = int(digits[:end])
    except ValueError:
        raise TritonModelException(
            f"failed to get model version from specified version string '{version}' (details: stol), version should be "
            "an integral value > 0"
        ) from None
    if number < 0:
        raise TritonModelException(
            f"failed to get model version from specified version string '{version}', version should be an integral "
            "value > 0"
        )
    return str(number)


class ModelConfig:
    """The configuration of a model, made from JSON, as ``auto_complete_config`` completes it."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as it is now; the very dict, not a copy."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest number of rows in a batch; ValueError if the configuration has a larger one."""
        given = self._model_config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but {_IN_AUTO_COMPLETE} '{self._name}' specified "
                f"max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Let it batch requests, from Triton 22.06 on; ValueError if the configuration names another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Describe an input by ``name``, ``data_type``, ``dims``, and maybe ``optional``; ValueError unless it fits."""
        self._add("input", input, (*_REQUIRED, "optional"), "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Describe an output by ``name``, ``data_type`` and ``dims``; ValueError as of :meth:`add_input`."""
        self._add("output", output, _REQUIRED, "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, bool]) -> None:
        """Say whether the model is ``decoupled``; from Triton 23.11 on."""
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


NAME: Final = "triton_python_backend_utils"
_NATIVE: Final = "c_python_backend_utils"


_FUNCTIONS: Final = (
    get_input_config_by_name,
    get_input_tensor_by_name,
    get_output_config_by_name,
    get_output_tensor_by_name,
    numpy_to_triton_type,
    triton_string_to_numpy,
    triton_to_numpy_type,
    using_decoupled_model_transaction_policy,
)


def backend_module(host: Host, faults: Faults = Faults()) -> ModuleType:  # noqa: B008  # it cannot be changed
    """Return the module of one emulated server, for ``sys.modules`` while its models are loaded and run."""
    made = ModuleType(NAME, "What a model of Triton's Python backend has to do with its server.")
    control = ModelControl(host)
    vars(made).update(
        {function.__name__: function for function in _FUNCTIONS},
        TRITON_STRING_TO_NUMPY=TRITON_STRING_TO_NUMPY,
        deserialize_bytes_tensor=deserialize_bytes_tensor,
        serialize_byte_tensor=serialize_byte_tensor,
        ModelConfig=ModelConfig,
        Tensor=_bound(Tensor, _faults=faults),
        InferenceRequest=_bound(InferenceRequest, _host=host),
        InferenceResponse=InferenceResponse,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        Logger=_bound(Logger, _host=host),
        MetricFamily=_bound(MetricFamily, _host=host),
        PreferredMemory=PreferredMemory,
        load_model=control.load_model,
        unload_model=control.unload_model,
        is_model_ready=control.is_model_ready,
        get_model_dir=host.model_dir,
        TRITONSERVER_MEMORY_GPU=MemoryType.TRITONSERVER_MEMORY_GPU,
        TRITONSERVER_MEMORY_CPU=MemoryType.TRITONSERVER_MEMORY_CPU,
        TRITONSERVER_REQUEST_FLAG_SEQUENCE_START=1,
        TRITONSERVER_REQUEST_FLAG_SEQUENCE_END=2,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TRITONSERVER_REQUEST_RELEASE_ALL=1,
        TRITONSERVER_REQUEST_RELEASE_RESCHEDULE=2,
    )
    return made


def _bound(base: type, **attributes: Any) -> type:
    """Return a class that belongs to one server."""
    slots = {"__slots__": (), "__module__": _NATIVE, "__doc__": base.__doc__, "__qualname__": base.__name__}
    return type(base.__name__, (base,), slots | attributes)
