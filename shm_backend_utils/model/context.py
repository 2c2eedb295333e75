"""The state that all calls of a session share, its report for a probe, and the sequence of one call.

Nothing of a report goes into an error, a log or a tensor of Triton's: only a client that may lend memory learns of it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .. import __version__
from ..errors import MachineError, ModelError, ProbedError, TableError
from ..gpu.memory.access import CudaAccess
from ..gpu.model import DeviceArrays
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
from .mapping.mapped import Slot, replayed
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
        self.request_spec = spec  # the same, unless Triton reshapes a tensor: then with the shapes of requests
        self.form = TableForm.of(spec)
        self.outputs: Mapping[str, TensorForm] = TensorForm.of_all(  # those that Triton does not reshape
            {name: tensor for name, tensor in spec.outputs.items() if tensor.reshape is None}
        )
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


def answer_probe(context: Context, slot: Slot, probe: Probe) -> NoReturn:
    """Write the report to where the probe has room, give back the slot's lease, and end the request by ProbedError."""
    try:
        if not slot.record.start(probe.generation):
            raise replayed()
        try:
            _write_report(context, slot, probe)
        finally:  # also without a report: the client would take the model for one that has died
            slot.record.complete(probe.generation, NO_RESULTS)
    finally:
        slot.lease.give_back()
    raise ProbedError("the report is in the client's memory; a probe has no other answer")


def _write_report(context: Context, slot: Slot, probe: Probe) -> None:
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
    """Return the UUIDs of the GPUs that this process sees, and why it sees none."""
    try:
        runtime: CudaRuntime = context.arrays.runtime
        uuids = [runtime.device_uuid(device) for device in range(runtime.device_count())]
    except MachineError as error:
        return {"uuids": [], "obstacle": str(error)}
    return {"uuids": uuids, "obstacle": ""}
