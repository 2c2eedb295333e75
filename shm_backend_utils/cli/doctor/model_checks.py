"""Can this process share memory with a model, and what runs there? A probe of the direct path, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...client import server_calls
from ...client.errors import DeadlineExceededError, InferenceError
from ...client.paths.choice import ProbeAnswer, probe_model
from ...client.steps import BlockingDriver
from ...errors import CallerError, MachineError, PeerError, ShmError
from ...memory.kinds import RegionKind
from ...model_spec import ModelSpec
from ...protocol.refusals import NOT_OPENED
from .checked_answers import checked_config, checked_report
from .checkup import Checkup
from .findings import Finding
from .gpu_checks import ClientGpus, findings_on_gpus, has_gpus
from .instances import examine_processes
from .refusals import finding_of_refusal
from .report_checks import findings_in_report
from .server_checks import finding_of_error
from .troubles.model import MODEL_BUSY, NEEDS_GRPC, NO_SEALED_MEMORY, REFUSED, WRONG_REPORT

__all__ = ["Probes", "config_of", "examine_model"]

_ANSWER_S: Final = 1.5
_FAILURES: Final = (
    (DeadlineExceededError, MODEL_BUSY),
    (PeerError, WRONG_REPORT),
    (CallerError, NEEDS_GRPC),
)


class Probes(NamedTuple):
    """What came of the probes of a model with each kind of memory; None where it need not be tried."""

    sealed: ProbeAnswer | MachineError
    system: ProbeAnswer | MachineError | None

    @property
    def report(self) -> Mapping[str, Any] | None:
        """The model's report, if one of them has had one."""
        for answer in (self.sealed, self.system):
            if isinstance(answer, ProbeAnswer) and answer.report is not None:
                return checked_report(answer.report)
        return None

    @property
    def kind(self) -> RegionKind:
        """What memory the model could open."""
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
    """Look whether a model lives, and probe it; return whether it shares memory.

    Of the versions that are ready, the one that requests get that name none is probed. Only a model that ``declares``
    the direct path, and whose configuration has nothing against that, is. ``here`` is what :func:`.process_facts` says
    of this process.
    """
    name = str(config.get("name"))
    try:
        spec = ModelSpec.from_config(config)
        tries = examine_processes(driver, checkup, config, versions)
        if not tries or not declares or spec.obstacle_to_direct() is not None:
            return False  # which are findings already
        looks_for_gpus = has_gpus(config) or bool(gpus.uuids)
        probes = _probe_the_living(driver, checkup, spec, tries, with_gpus=looks_for_gpus)
    except ShmError as error:
        trouble = next((trouble for kind, trouble in _FAILURES if isinstance(error, kind)), None)
        checkup.add_findings(finding_of_error(error) if trouble is None else Finding(trouble, str(error), name))
        return False
    report = probes.report
    if report is None:
        checkup.add_findings(finding_of_refusal(probes.sealed, probes.system, driver.transport.host, spec.name))
        return False
    checkup.add_fine(f"it has read a nonce in {probes.kind.value} memory of this process, and written back", name)
    if probes.kind is RegionKind.SYSTEM and not isinstance(probes.sealed, MachineError):
        checkup.add_findings(Finding(NO_SEALED_MEMORY, f"{_apart(report, here)}: {probes.sealed.refusal}", name))
    same = f"library {report.get('version')}, as here; NumPy {report.get('numpy')}"
    checkup.conclude(findings_in_report(spec, report), same, name)
    if looks_for_gpus:
        checkup.conclude(findings_on_gpus(config, gpus, report, here), "client and model see the same GPUs", name)
    return True


def _probe_the_living(
    driver: BlockingDriver, checkup: Checkup, spec: ModelSpec, tries: int, *, with_gpus: bool
) -> Probes:
    """Probe a model, up to so many times while it is a dead process that gets the probe."""
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
            if isinstance(error, MachineError) and not isinstance(error, ConnectionError):  # that is not this machine's
                return error
            raise
        except OSError as error:  # /dev/shm lets nobody make a file
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
    """Return a model's configuration; None where the server does not tell, which is a finding."""
    codec = driver.transport.codec
    try:
        told = driver.run(server_calls.ask(codec, checkup.until(_ANSWER_S), "model config", model))
        return {**checked_config(told), "name": model}
    except ValueError as error:
        checkup.add_findings(Finding(REFUSED, f"what the server tells is no configuration: {error}", model))
    except InferenceError as error:
        trouble = MODEL_BUSY if isinstance(error, DeadlineExceededError) else REFUSED
        checkup.add_findings(Finding(trouble, f"the server does not tell its configuration: {error.message()}", model))
    except ShmError as error:
        checkup.add_findings(finding_of_error(error))
    return None
