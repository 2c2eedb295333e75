"""What all calls of a session share; the sequence of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from .forward import Forwarder
from .mapping.mapped import Slot
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


@dataclass(frozen=True, slots=True)
class Context:
    """What all calls of a session share."""

    spec: ModelSpec  # the model's, with the shapes that ``model.py`` sees
    request_spec: ModelSpec  # the same, unless Triton reshapes a tensor: then with the shapes of requests
    form: TableForm | None  # of its tables
    outputs: Mapping[str, OutputForm]  # of those of numbers that Triton does not reshape
    fills_slots: bool  # Triton fills slots of a batch that no sequence has a request for, by requests of its own
    backend: TritonBackend
    resolver: Resolver
    slots: Mapping[str, Slot]  # the registry's: what is mapped already
    arrays: DeviceArrays
    forwarder: Forwarder
    takes_delivered: bool  # whether requests may come that name no memory
    stream_patience_s: float  # a stream waits so long for its client to release a frame
    stream_total_patience_s: float  # and so long for all frames together
    pinning: Pinning | None  # for memory that is copied to a GPU; None if it is not to be pinned
    server_url: str  # where the server tells what names stand for; empty if that is not known

    @classmethod
    def of_session(cls, spec: ModelSpec, config: Config, cuda: CudaAccess, device: int) -> Context:
        """Make what a session needs; ``device`` is the instance's GPU."""
        obstacle = spec.obstacle_to_direct()
        if obstacle is not None and spec.paths is not None and DIRECT in spec.paths:
            raise ModelError(obstacle)
        backend = TritonBackend()
        arrays = DeviceArrays(cuda, device)
        pinning = Pinning(cuda, backend.log_warning) if config.pin_host_memory else None
        resolver = Resolver(config, cuda, pinning)
        return cls(
            spec.as_model_sees(),
            spec,
            TableForm.of(spec),
            {
                name: OutputForm.of(name, tensor.dtype, len(tensor.shape), tensor.fixed_end)
                for name, tensor in spec.outputs.items()
                if tensor.dtype is not None and tensor.dtype is not BYTES and tensor.reshape is None
            },
            spec.sequences == "direct" and spec.max_batch_size > 1,
            backend,
            resolver,
            resolver.registry.slots,
            arrays,
            Forwarder(spec.name, backend, arrays, config.server_url, config.inline_bytes),
            spec.paths != frozenset({DIRECT}),
            config.stream_patience_s,
            config.stream_total_patience_s,
            pinning,
            config.server_url,
        )

    def close(self) -> None:
        """Unmap every region, and remove those that were made to forward. Twice is fine."""
        self.resolver.close()
        self.arrays.close()
        self.forwarder.close()
