"""Are a model's processes alive, can this process share memory with them, and which versions run there?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from ... import __version__
from ...client import server_calls
from ...client.errors import DeadlineExceededError, InferenceError
from ...client.paths.choice import ProbeAnswer, probe_model
from ...client.steps import BlockingDriver
from ...client.transports.grpc.codec import GrpcCodec
from ...client.transports.transport import is_this_machine
from ...dtypes import BYTES
from ...errors import NOT_OPENED, CallerError, MachineError, PeerError, RegionGoneError, ShmError, VersionError
from ...gpu.memory.access import CudaAccess
from ...memory.machine import visible_devices
from ...memory.managed import RegionKind
from ...model_spec import ModelSpec
from .checkup import Checkup, Finding
from .server_checks import finding_of_error
from .troubles import Trouble

__all__ = ["config_of", "examine_model", "find_client_gpus"]

_ANSWER_S: Final = 1.5
_FAILURES: Final = (
    (DeadlineExceededError, Trouble.MODEL_BUSY),
    (PeerError, Trouble.WRONG_REPORT),
    (CallerError, Trouble.NEEDS_GRPC),
)
_MOST_ASKED: Final = 32
_LONGEST: Final = 300
_OF_SCHEDULER: Final = re.compile(r"^(\[.*?\] )?(Exceeds maximum queue size|Request timeout expired)")
_OF_ANOTHER_USER: Final = re.compile(r"(?i)belongs to user|permission denied|SHM_ALLOWED_UIDS|its mode")
_CODEC: Final = GrpcCodec()
_TYPES: Final = {"stub_reads_numpy": bool, "knows_server": bool, "version": str, "numpy": str}
_DEVICE: Final = Path("/dev/nvidiactl")
_INSTANCE: Final = "MIG-"


class Probes(NamedTuple):
    """The results of a model's probes with each kind of memory; None for a kind that was not tried."""

    sealed: ProbeAnswer | MachineError
    system: ProbeAnswer | MachineError | None

    @property
    def report(self) -> Mapping[str, Any] | None:
        """The model's report, if a probe has brought one."""
        for answer in (self.sealed, self.system):
            if isinstance(answer, ProbeAnswer) and answer.report is not None:
                return checked_report(answer.report)
        return None

    @property
    def kind(self) -> RegionKind:
        """The kind of memory that the model could open."""
        is_sealed = isinstance(self.sealed, ProbeAnswer) and self.sealed.report is not None
        return RegionKind.SEALED if is_sealed else RegionKind.SYSTEM


def examine_model(
    driver: BlockingDriver,
    checkup: Checkup,
    config: Mapping[str, Any],
    versions: Sequence[str],
    here: Mapping[str, Any],
    gpus: ClientGpus,
    *,
    declares: bool,
) -> bool:
    """Check if a model is alive, and probe it if it ``declares`` the direct path; return whether it shares memory."""
    name = str(config.get("name"))
    try:
        spec = ModelSpec.from_config(config)
        tries = examine_processes(driver, checkup, config, versions)
        if not tries or not declares or spec.obstacle_to_direct() is not None:
            return False  # the reason is a finding already
        kinds = [group.get("kind") for group in config.get("instance_group", ())]
        looks_for_gpus = "KIND_GPU" in kinds or bool(gpus.uuids)
        probes = _probe_the_living(driver, checkup, spec, tries, with_gpus=looks_for_gpus)
    except ShmError as error:
        trouble = next((trouble for kind, trouble in _FAILURES if isinstance(error, kind)), None)
        checkup.findings.append(finding_of_error(error) if trouble is None else Finding(trouble, str(error), name))
        return False
    report = probes.report
    if report is None:
        checkup.findings.append(finding_of_refusal(probes.sealed, probes.system, driver.transport.host, spec.name))
        return False
    checkup.add_fine(f"it has read a nonce in {probes.kind.value} memory of this process, and written back", name)
    if probes.kind is RegionKind.SYSTEM and not isinstance(probes.sealed, MachineError):
        checkup.add(Trouble.NO_SEALED_MEMORY, f"{_apart(report, here)}: {probes.sealed.refusal}", name)
    same = f"library {report.get('version')}, as here; NumPy {report.get('numpy')}"
    checkup.conclude(findings_in_report(spec, report), same, name)
    if looks_for_gpus:
        way = "by descriptor, as sealed memory" if probes.kind is RegionKind.SEALED else "by CUDA IPC"
        same = f"client and model see the same GPUs; they share memory there {way}"
        checkup.conclude(findings_on_gpus(config, gpus, report, here), same, name)
    return True


def _probe_the_living(
    driver: BlockingDriver, checkup: Checkup, spec: ModelSpec, tries: int, *, with_gpus: bool
) -> Probes:
    """Probe a model again, at most ``tries`` times in all, while a dead process gets the probe."""
    while True:
        probes = _probe(driver, checkup, spec, with_gpus=with_gpus)
        tries -= 1
        if not tries or not isinstance(probes.sealed, ProbeAnswer):
            return probes
        if not server_calls.is_of_dead_process(probes.sealed.refusal):
            return probes


def _probe(driver: BlockingDriver, checkup: Checkup, spec: ModelSpec, *, with_gpus: bool) -> Probes:
    def of(kind: RegionKind) -> ProbeAnswer | MachineError:
        deadline = checkup.until(_ANSWER_S)
        try:
            return driver.run(probe_model(driver.transport.codec, spec, kind, deadline, with_gpus=with_gpus))
        except ShmError as error:
            if isinstance(error, MachineError) and not isinstance(error, ConnectionError):  # of the server's
                return error
            raise
        except OSError as error:  # /dev/shm takes no new file
            return MachineError(str(error))

    sealed = of(RegionKind.SEALED)
    needs_other = isinstance(sealed, MachineError) or sealed.code in NOT_OPENED
    return Probes(sealed, of(RegionKind.SYSTEM) if needs_other else None)


def _apart(report: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return which namespaces of client and model differ."""
    mine, others = here["namespaces"], report.get("namespaces") or {}
    apart = [name for name, inode in mine.items() if inode is not None and others.get(name) not in (None, inode)]
    return f"other namespaces: {', '.join(apart)}" if apart else "the namespaces are the same"


def config_of(driver: BlockingDriver, checkup: Checkup, model: str) -> dict[str, Any] | None:
    """Return a model's configuration; if the server does not give it, add a finding and return None."""
    codec = driver.transport.codec
    try:
        answer = driver.run(server_calls.ask(codec, checkup.until(_ANSWER_S), "model config", model))
        return {**checked_config(answer), "name": model}
    except ValueError as error:
        checkup.add(Trouble.REFUSED, f"the server's answer is not a model configuration: {error}", model)
    except InferenceError as error:
        trouble = Trouble.MODEL_BUSY if isinstance(error, DeadlineExceededError) else Trouble.REFUSED
        checkup.add(trouble, f"the server does not give its configuration: {error.message()}", model)
    except ShmError as error:
        checkup.findings.append(finding_of_error(error))
    return None


def examine_processes(
    driver: BlockingDriver, checkup: Checkup, config: Mapping[str, Any], versions: Sequence[str]
) -> int:
    """Examine the processes of each version of a Python model; if they cannot be seen, ask its session to answer.

    Return how many probes it takes to reach a living process, 0 if none lives: each probe goes to the next process.
    """
    codec, name, tries = driver.transport.codec, str(config["name"]), 0
    for version in versions:
        count = server_calls.instances_of(config)
        living = driver.run(server_calls.living_in(codec, checkup.until(_ANSWER_S), config, version))
        asked = min(count, _MOST_ASKED) if living is None else min(living, 1)
        signs = [
            driver.run(server_calls.sign_of_life(codec, checkup.until(_ANSWER_S), config, version))
            for _ in range(asked)
        ]
        lacking = [sign for sign in signs if sign and not server_calls.is_of_dead_process(sign)]
        if lacking:
            checkup.add(Trouble.FORWARD_FAILS, lacking[0], name)
        state = "processes are dead"
        if living is None:
            state = "requests, one after another, met a dead process"
            count, living = asked, asked - sum(map(server_calls.is_of_dead_process, filter(None, signs)))
            if None in signs and not driver.run(server_calls.notices_dead_models(codec, checkup.until(_ANSWER_S))):
                checkup.add(Trouble.LIFE_UNKNOWN, "no session answers, and no process is seen", name)
        if living < count:
            of_version = f"of version {version}: " if len(versions) > 1 else ""
            trouble = Trouble.DEAD_INSTANCE if living or len(versions) > 1 else Trouble.DEAD_STUB
            checkup.add(trouble, f"{of_version}{count - living} of {count} {state}", name)
        tries = max(tries, count if 0 < living < count else min(living, 1))
    return tries


def finding_of_refusal(
    sealed: ProbeAnswer | MachineError, system: ProbeAnswer | MachineError | None, host: str, model: str
) -> Finding:
    """Return the finding for a model that has written no report with either kind of memory; None if not tried."""
    answers = [each for each in (sealed, system) if isinstance(each, ProbeAnswer)]
    if not answers:
        return Finding(Trouble.REFUSED, f"this process has no memory to share: {system or sealed}", model)
    last = answers[-1]
    found = " ".join(last.refusal.split())[:_LONGEST]
    if server_calls.is_of_dead_process(last.refusal):
        trouble = Trouble.DEAD_STUB
    elif _OF_SCHEDULER.search(last.refusal):
        trouble = Trouble.MODEL_BUSY
    elif last.code == VersionError.code:
        trouble = Trouble.OTHER_PROTOCOL
    elif last.code in NOT_OPENED:
        trouble = _trouble_of_memory(last.code, [each.refusal for each in answers], host)
    elif last.code:
        trouble = Trouble.REFUSED
    else:
        trouble, found = Trouble.NO_SESSION, f"it has taken the probe as a request: {found or 'and answered it'}"
    return Finding(trouble, found, model)


def _trouble_of_memory(code: str, messages: list[str], host: str) -> Trouble:
    """Return why a model does not open memory of this process, by its answer for each kind."""
    if any(map(_OF_ANOTHER_USER.search, messages)):
        return Trouble.OTHER_USER
    if not is_this_machine(host):
        return Trouble.OTHER_MACHINE
    return Trouble.OTHER_NAMESPACE if code == RegionGoneError.code else Trouble.REFUSED


def findings_in_report(spec: ModelSpec, report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the faults that the report of a model's session shows. Missing members are no faults."""
    version = report.get("version")
    if version != __version__:
        yield Finding(Trouble.OTHER_VERSION, f"the model has {version}, this process has {__version__}", spec.name)
    if report.get("stub_reads_numpy") is False:
        strings = [
            name for each in (spec.inputs, spec.outputs) for name, tensor in each.items() if tensor.dtype is BYTES
        ]
        found = f"NumPy {report.get('numpy')}"
        if strings:
            yield Finding(Trouble.NUMPY_2_STRINGS, f"{found}, and strings: {', '.join(strings)}", spec.name)
        else:
            yield Finding(Trouble.NUMPY_2_OLD_STUB, found, spec.name)
    if report.get("knows_server") is False:
        yield Finding(Trouble.NAMES_UNUSABLE, "found no address of the server in its command line", spec.name)


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as Triton writes it in JSON; ValueError if it is not valid."""
    message = model_config_pb2.ModelConfig()
    try:
        text = json.dumps(config, ensure_ascii=False).encode()
        json_format.Parse(text, message, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from None
    return _CODEC.as_dict(service_pb2.ModelConfigResponse(config=message))


def checked_report(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's report without the members whose type differs from the protocol's."""
    gpus = answer.get("gpus")
    report: dict[str, Any] = {name: answer[name] for name, kind in _TYPES.items() if isinstance(answer.get(name), kind)}
    report["namespaces"] = _of_type(answer.get("namespaces"), int)
    report["visible_devices"] = _of_type(answer.get("visible_devices"), str)
    if isinstance(gpus, Mapping):
        uuids, obstacle = gpus.get("uuids"), gpus.get("obstacle")
        report["gpus"] = {
            "uuids": [each for each in uuids if isinstance(each, str)] if isinstance(uuids, list) else [],
            "obstacle": obstacle if isinstance(obstacle, str) else "",
        }
    return report


def _of_type(found: Any, kind: type) -> dict[str, Any]:
    return {name: each for name, each in found.items() if isinstance(each, kind)} if isinstance(found, Mapping) else {}


class ClientGpus(NamedTuple):
    """The GPUs that this process sees."""

    uuids: tuple[str, ...] = ()  # 32 hexadecimal digits each; with MIG, those of the instances
    obstacle: str = ""  # why it sees none; empty if nothing points to a GPU
    visible: Mapping[str, str] = {}  # the environment variables that select them


def find_client_gpus(cuda: CudaAccess | None = None) -> ClientGpus:
    """Return the GPUs of this process. Without NVIDIA's device file the driver is not loaded, which takes time."""
    visible = visible_devices()
    if cuda is None and not _DEVICE.exists():
        return ClientGpus(visible=visible)
    try:
        runtime = (cuda or CudaAccess()).runtime
        uuids = tuple(runtime.device_uuid(device) for device in range(runtime.device_count()))
    except MachineError as error:
        return ClientGpus((), str(error), visible)
    return ClientGpus(uuids, "", visible)


def findings_on_gpus(
    config: Mapping[str, Any], client: ClientGpus, report: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield the reasons why client and model, by its report, cannot share memory of GPUs."""
    model = str(config.get("name"))
    gpus = report.get("gpus") or {}
    uuids, obstacle = tuple(gpus.get("uuids") or ()), str(gpus.get("obstacle") or "")
    if not uuids:
        yield Finding(Trouble.DRIVER_NOT_SEEN, f"the model sees no GPU: {obstacle or 'it has none'}", model)
        return
    if not client.uuids:
        if client.obstacle:
            yield Finding(Trouble.DRIVER_NOT_SEEN, f"this process sees no GPU: {client.obstacle}", model)
        return
    alien = [uuid for uuid in client.uuids if uuid not in uuids]
    if alien:
        visible = [*client.visible.values(), *(report.get("visible_devices") or {}).values()]
        trouble = Trouble.MIG if any(_INSTANCE in str(each) for each in visible) else Trouble.GPU_NOT_SEEN
        seen = ", ".join(uuids)
        yield Finding(trouble, f"this process sees {', '.join(alien)}, the model {seen}", model)
    mine, other = here["namespaces"].get("pid"), (report.get("namespaces") or {}).get("pid")
    if mine is not None and other is not None and mine != other:
        yield Finding(Trouble.PID_NAMESPACE, f"PID namespace {mine} here, {other} there", model)
