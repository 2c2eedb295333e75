"""What Triton's Python backend gives to ``model.py``, as Triton 26.07 (2.71) has it.

``import triton_python_backend_utils as pb_utils`` works in a process that Triton started, and nowhere else. What came
after Triton 22.01 (2.18) says from which version on it is there; an older server has no such name.

While ``model.py`` is imported, functions, constants and :class:`ModelConfig` of this module are there, and nothing else
is: tensors, requests and all that is compiled into that process come when the module ran. So annotations that name
them need ``from __future__ import annotations``, and default values cannot have them.

What a model meets and this module has no name for is in ``c_python_backend_utils``: ``InferenceResponseSender``,
``ResponseIterator``, ``InferenceTrace``, ``Metric``.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from c_python_backend_utils import TRITONSERVER_MEMORY_CPU as TRITONSERVER_MEMORY_CPU
from c_python_backend_utils import TRITONSERVER_MEMORY_GPU as TRITONSERVER_MEMORY_GPU
from c_python_backend_utils import InferenceRequest as InferenceRequest
from c_python_backend_utils import InferenceResponse as InferenceResponse
from c_python_backend_utils import Logger as Logger
from c_python_backend_utils import MetricFamily as MetricFamily
from c_python_backend_utils import PreferredMemory as PreferredMemory
from c_python_backend_utils import Tensor as Tensor
from c_python_backend_utils import TritonError as TritonError
from c_python_backend_utils import TritonModelException as TritonModelException
from c_python_backend_utils import is_model_ready as is_model_ready
from c_python_backend_utils import load_model as load_model
from c_python_backend_utils import unload_model as unload_model

TRITON_STRING_TO_NUMPY: dict[str, type[np.generic] | type[bool]]
"""NumPy's type by a configuration's: ``TYPE_BOOL``, ``TYPE_UINT8``, …, ``TYPE_STRING``; without ``TYPE_BF16``."""

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
"""From Triton 22.02 (2.19) on. The request is the first of its sequence."""
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
"""From Triton 22.02 (2.19) on. The request is the last of its sequence."""
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
"""From Triton 22.05 (2.22) on. No response comes after this one."""
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
"""From Triton 23.11 (2.40) on. The request is done when ``execute`` is."""
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
"""From Triton 23.11 (2.40) on. The request is to be executed again."""

def get_model_dir() -> str:
    """From Triton 23.07 (2.36) on. Return the folder of the model's version: that of ``model.py``."""

def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request, or None if it has none of that name: it is optional, or misspelt."""

def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of another model's response, or None if it has none of that name."""

def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of an input, or None: ``name``, ``data_type``, ``dims``, …

    ``model_config`` is ``json.loads(args["model_config"])``, and what is returned is a part of it, not a copy.
    """

def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return what a configuration says of an output, or None: ``name``, ``data_type``, ``dims``, …

    ``model_config`` is ``json.loads(args["model_config"])``, and what is returned is a part of it, not a copy.
    """

def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """From Triton 22.05 (2.22) on. Return whether a model is decoupled.

    ``model_config`` is ``json.loads(args["model_config"])``.
    """

def triton_string_to_numpy(triton_type_string: str) -> type[np.generic] | type[bool]:
    """Return NumPy's type for a ``data_type`` of a configuration, as ``"TYPE_FP32"``.

    Raises
    ------
    KeyError
        There is none: it is ``TYPE_BF16``, or no type.
    """

def triton_to_numpy_type(data_type: int) -> type[np.generic] | None:
    """Return NumPy's type for a number from 1, BOOL, to 13, BYTES; None for all others, BF16 among them."""

def numpy_to_triton_type(data_type: np.dtype[Any] | type[np.generic]) -> int | None:
    """Return Triton's number for a type of NumPy, from 1, BOOL, to 13, BYTES; None for those that Triton has not."""

def serialize_byte_tensor(
    input_tensor: np.ndarray[Any, np.dtype[np.object_]] | np.ndarray[Any, np.dtype[np.bytes_]],
) -> bytes | tuple[()]:
    """Return strings as Triton lays them out: 4 bytes for the length of each, little-endian, and its bytes.

    Parameters
    ----------
    input_tensor
        Of any shape, read in C order. Of ``object`` with ``bytes``, or with what ``str`` takes, which becomes UTF-8; or
        of ``S20`` and its like, which has lost zeros at the ends. Of another type it returns None.

    Returns
    -------
    bytes or ()
        A copy. Of an empty array it is an empty tuple.
    """

def deserialize_bytes_tensor(
    encoded_tensor: bytes | bytearray | memoryview | npt.NDArray[np.uint8],
) -> npt.NDArray[np.object_]:
    """Return what :func:`serialize_byte_tensor` made as an array of ``bytes``, of one dimension; all are copies.

    Raises
    ------
    struct.error
        It ends in the middle of a string.
    """

class ModelConfig:
    """From Triton 22.06 (2.23) on. A model's configuration, to be completed by ``auto_complete_config``.

    Parameters
    ----------
    model_config
        JSON text.
    """

    def __init__(self, model_config: str) -> None: ...
    def as_dict(self) -> dict[str, Any]:
        """Return the configuration itself, not a copy: what is written there becomes a part of it."""

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set ``max_batch_size``.

        Raises
        ------
        ValueError
            The configuration has a larger one.
        """

    def set_dynamic_batching(self) -> None:
        """Have the dynamic batcher, with its default settings, unless the configuration has it already.

        Raises
        ------
        ValueError
            The configuration has another scheduler: of sequences or ensembles.
        """

    def add_input(self, input: dict[str, Any]) -> None:
        """Add an input, or complete the one of that name.

        Parameters
        ----------
        input
            ``name``; ``data_type``, as ``"TYPE_FP32"``; ``dims``, a list of numbers without the batch, -1 for any; and,
            from Triton 23.11 (2.40) on, maybe ``optional``. It is kept, not copied.

        Raises
        ------
        ValueError
            One of these is missing, there is another one, or the configuration says otherwise.
        """

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output, or complete the one of that name.

        Parameters
        ----------
        output
            ``name``, ``data_type`` and ``dims``, as of an input. It is kept, not copied.

        Raises
        ------
        ValueError
            One of these is missing, there is another one, or the configuration says otherwise.
        """

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, bool]) -> None:
        """From Triton 23.11 (2.40) on. Say whether the model is decoupled: ``{"decoupled": True}``.

        Raises
        ------
        ValueError
            There is another key, or the configuration says otherwise.
        """
