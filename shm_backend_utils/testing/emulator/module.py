"""The module that ``import triton_python_backend_utils`` gives."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from . import lookups
from .bytes_tensors import deserialize_bytes_tensor, serialize_byte_tensor
from .errors import TritonError, TritonModelException
from .faults import Faults
from .host import Host
from .logger import Logger
from .memory import MemoryType, PreferredMemory
from .metrics import MetricFamily
from .model_config import ModelConfig
from .model_control import ModelControl
from .request import InferenceRequest
from .response import InferenceResponse
from .tensor import Tensor

__all__ = ["NAME", "backend_module"]

NAME: Final = "triton_python_backend_utils"
_NATIVE: Final = "c_python_backend_utils"


def backend_module(host: Host, faults: Faults = Faults()) -> ModuleType:  # noqa: B008  # it cannot be changed
    """Return the module of one emulated server, for ``sys.modules`` while its models are loaded and run."""
    made = ModuleType(NAME, "What a model of Triton's Python backend has to do with its server.")
    control = ModelControl(host)
    vars(made).update(
        {name: getattr(lookups, name) for name in lookups.__all__},
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
