"""The state that all calls of a session share, the report that answers a probe, and a request's sequence.

A report goes to the client's memory only, never to an error, a log or a Triton tensor.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .. import __version__
from ..errors import MachineError, ModelError, ProbedError, TableError
from ..gpu.instance import InstanceGpus
from ..gpu.memory.access import CudaAccess
from ..gpu.runtime import CudaRuntime
from ..memory.machine import process_facts, visible_devices
from ..model_spec import ModelSpec
from ..protocol.form import TableForm
from ..protocol.layout import VERSION
from ..protocol.probe import Probe, digest_of
from ..protocol.results import NO_RESULTS
from ..protocol.table import TensorForm
from ..tensors.view import DIRECT
from .config import Config
from .forward.forwarder import Forwarder
from .mapping.mapped import MappedSlot, replayed
from .mapping.memory import Pinning
from .mapping.resolver import Resolver
from .triton import TritonBackend

__all__ = ["Context", "SequencePart", "answer_probe"]


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
        self.request_spec = spec  # with the shapes in requests; they differ only if Triton reshapes a tensor
        self.form = TableForm.of(spec)
        self.outputs: Mapping[str, TensorForm] = TensorForm.of_all(  # the outputs that Triton does not reshape
            {name: tensor for name, tensor in spec.outputs.items() if tensor.reshape is None}
        )
        # Triton fills the batch slots of sequences without a request with requests of its own.
        self.fills_slots = spec.sequences == "direct" and spec.max_batch_size > 1
        self.takes_in_band = spec.paths != frozenset({DIRECT})  # whether requests may come without shared memory
        self.backend = TritonBackend()
        self.arrays = InstanceGpus(cuda, device)
        self.pinning = Pinning(cuda, self.backend.log_warning) if config.pin_host_memory else None
        self.resolver = Resolver(config, cuda, self.pinning)
        self.slots = self.resolver.registry.slots  # the slots of mapped regions, by address
        self.forwarder = Forwarder(spec.name, self.backend, self.arrays, config.server_url, config.inline_bytes)

    def close(self) -> None:
        """Unmap every region, and remove the regions that were made for ``call.forward``. Twice is fine."""
        self.arrays.close()
        self.resolver.close()  # frees what the others retire, too
        self.forwarder.close()


def answer_probe(context: Context, slot: MappedSlot, probe: Probe) -> NoReturn:
    """Write the report to the probe's memory, give back the slot's lease, and end the request with ProbedError."""
    try:
        if not slot.record.start(probe.generation):
            raise replayed()
        try:
            _write_report(context, slot, probe)
        finally:  # even without a report: else the client would think that the model has died
            slot.record.complete(probe.generation, NO_RESULTS)
    finally:
        slot.lease.give_back()
    raise ProbedError("the report is in the client's memory; a probe has no other answer")


def _write_report(context: Context, slot: MappedSlot, probe: Probe) -> None:
    memory = slot.memory.array
    _, _, _, begin, length = probe.nonce
    nonce = bytes(memory[begin : begin + length])
    text = json.dumps({"digest": digest_of(nonce), **_report(context, with_gpus=probe.with_gpus)}).encode()
    _, begin, room = probe.report
    if room < len(text):
        raise TableError("outputs[0].byte_size", str(room), f"{len(text)}, the length of the report")
    memory[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
    if room > len(text):
        memory[begin + len(text)] = 0


def _report(context: Context, *, with_gpus: bool) -> dict[str, Any]:
    return {
        "version": __version__,
        "protocol": VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "stub_reads_numpy": context.backend.reads_numpy,
        "knows_server": bool(context.config.server_url),
        **process_facts(),
        "visible_devices": visible_devices(),
        "gpus": _gpus(context) if with_gpus else None,
    }


def _gpus(context: Context) -> dict[str, Any]:
    """Return the UUIDs of the GPUs that this process sees, and the reason if it sees none."""
    try:
        runtime: CudaRuntime = context.arrays.runtime
        uuids = [runtime.device_uuid(device) for device in range(runtime.device_count())]
    except MachineError as error:
        return {"uuids": [], "obstacle": str(error)}
    return {"uuids": uuids, "obstacle": ""}
