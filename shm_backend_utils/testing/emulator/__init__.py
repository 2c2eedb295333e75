"""``triton_python_backend_utils`` as a real stub has it, in any process."""

from .delivery import Delivery, TensorContent, deliver, deliver_response, sent_inputs, sent_outputs
from .host import Faults, Host, ResponseSink
from .metrics import MetricsRegistry
from .module import NAME, backend_module
from .pybind import TritonModelException

__all__ = [
    "NAME",
    "Delivery",
    "Faults",
    "Host",
    "MetricsRegistry",
    "ResponseSink",
    "TensorContent",
    "TritonModelException",
    "backend_module",
    "deliver",
    "deliver_response",
    "sent_inputs",
    "sent_outputs",
]
