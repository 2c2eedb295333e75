"""The state that all calls of a session share; the sequence of one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..dtypes import BYTES
from ..errors import ModelError
from ..gpu.memory.access import CudaAccess
from ..gpu.model import DeviceArrays
from ..model_spec import ModelSpec
from ..protocol.form import TableForm
from ..protocol.results import OutputForm
from ..tensors.view import DIRECT
from .config import Config
from .forward.forwarder import Forwarder
from .mapping.memory import Pinning
from .mapping.resolver import Resolver
from .triton import TritonBackend

__all__ = ["Context", "SequencePart"]


class SequencePart(NamedTuple):
    """The sequence that a request is part of.

    Attributes
    ----------
    correlation_id : int or str
        As the client chose it.
    is_start, is_end : bool
        Whether the request is the sequence's first, or its last.
    """

    correlation_id: int | str
    is_start: bool
    is_end: bool


class Context:
    """The state that all calls of a session share; ``device`` is the instance's GPU."""

    def __init__(self, spec: ModelSpec, config: Config, cuda: CudaAccess, device: int) -> None:
        obstacle = spec.obstacle_to_direct()
        if obstacle is not None and spec.paths is not None and DIRECT in spec.paths:
            raise ModelError(obstacle)
        self.config = config
        self.spec = spec.as_model_sees()  # with the shapes that ``model.py`` sees
        self.request_spec = spec  # the same, unless Triton reshapes a tensor: then with the shapes of requests
        self.form = TableForm.of(spec)
        self.outputs: Mapping[str, OutputForm] = {  # those of numbers that Triton does not reshape
            name: OutputForm.of(name, tensor.dtype, len(tensor.shape), tensor.fixed_end)
            for name, tensor in spec.outputs.items()
            if tensor.dtype is not None and tensor.dtype is not BYTES and tensor.reshape is None
        }
        # Triton fills slots of a batch that no sequence has a request for, by requests of its own.
        self.fills_slots = spec.sequences == "direct" and spec.max_batch_size > 1
        self.takes_delivered = spec.paths != frozenset({DIRECT})  # requests may come that name no memory
        self.backend = TritonBackend()
        self.arrays = DeviceArrays(cuda, device)
        self.pinning = Pinning(cuda, self.backend.log_warning) if config.pin_host_memory else None
        self.resolver = Resolver(config, cuda, self.pinning)
        self.slots = self.resolver.registry.slots  # those that are mapped already
        self.forwarder = Forwarder(spec.name, self.backend, self.arrays, config.server_url, config.inline_bytes)

    def close(self) -> None:
        """Unmap every region, and remove those that were made to forward. Twice is fine."""
        self.resolver.close()
        self.arrays.close()
        self.forwarder.close()
