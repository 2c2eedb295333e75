"""GPUs: do client and model see the same ones, and can they share what is there?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import MachineError
from ...gpu.memory.access import CudaAccess
from ...memory.process_facts import visible_devices
from .findings import Finding
from .troubles.model import DRIVER_NOT_SEEN, GPU_NOT_SEEN, MIG, PID_NAMESPACE

__all__ = ["ClientGpus", "find_client_gpus", "findings_on_gpus", "has_gpus"]

_DEVICE: Final = Path("/dev/nvidiactl")
_INSTANCE: Final = "MIG-"


class ClientGpus(NamedTuple):
    """What this process sees of GPUs."""

    uuids: tuple[str, ...] = ()  # 32 hexadecimal digits each; with MIG they are the instances'
    obstacle: str = ""  # why it sees none; empty if there is no sign of any
    visible: Mapping[str, str] = {}  # what the environment says of them


def find_client_gpus(cuda: CudaAccess | None = None) -> ClientGpus:
    """Return what this process sees. Without a sign of a GPU no driver is loaded, as that takes its time."""
    visible = visible_devices()
    if cuda is None and not _DEVICE.exists():
        return ClientGpus(visible=visible)
    try:
        runtime = (cuda or CudaAccess()).runtime
        uuids = tuple(runtime.device_uuid(device) for device in range(runtime.device_count()))
    except MachineError as error:
        return ClientGpus((), str(error), visible)
    return ClientGpus(uuids, "", visible)


def has_gpus(config: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration has instances on GPUs."""
    return any(group.get("kind") == "KIND_GPU" for group in config.get("instance_group", ()))


def findings_on_gpus(
    config: Mapping[str, Any], client: ClientGpus, report: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield what keeps client and model from sharing memory of GPUs.

    The report is the model's, with ``gpus``; ``here`` is what :func:`.process_facts` says of this process.
    """
    model = str(config.get("name"))
    told = report.get("gpus") or {}
    uuids, obstacle = tuple(told.get("uuids") or ()), str(told.get("obstacle") or "")
    if not uuids:
        yield Finding(DRIVER_NOT_SEEN, f"the model sees no GPU: {obstacle or 'it has none'}", model)
        return
    if not client.uuids:
        if client.obstacle:
            yield Finding(DRIVER_NOT_SEEN, f"this process sees no GPU: {client.obstacle}", model)
        return
    alien = [uuid for uuid in client.uuids if uuid not in uuids]
    if alien:
        visible = [*client.visible.values(), *(report.get("visible_devices") or {}).values()]
        trouble = MIG if any(_INSTANCE in str(each) for each in visible) else GPU_NOT_SEEN
        seen = ", ".join(uuids)
        yield Finding(trouble, f"this process sees {', '.join(alien)}, the model {seen}", model)
    mine, other = here["namespaces"].get("pid"), (report.get("namespaces") or {}).get("pid")
    if mine is not None and other is not None and mine != other:
        yield Finding(PID_NAMESPACE, f"PID namespace {mine} here, {other} there", model)
