"""The answer to a probe: a session describes itself, in the memory of a client whose memory it may open anyway.

Nothing of it goes into an error, a log or a tensor of Triton's: a client that may not lend memory learns nothing.
"""

from __future__ import annotations

import json
import platform
from typing import Any, NoReturn

import numpy as np

from ... import __version__
from ...errors import MachineError, ProbedError, TableError
from ...gpu.runtime import CudaRuntime
from ...memory.machine import process_facts, visible_devices
from ...protocol.layout import VERSION
from ...protocol.probe import Probe, digest_of
from ...protocol.results import NO_RESULTS
from ..context import Context
from ..mapping.mapped import Slot, replayed

__all__ = ["answer_probe"]


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
