"""Examine a server, the way to it, and its models: what is looked at, in which order, and what keeps from the rest."""

from __future__ import annotations

from typing import Final

from ...client.steps import BlockingDriver
from ...client.transports.connect import Connectable, connect
from ...client.transports.this_machine import is_this_machine
from ...errors import CallerError
from ...memory.process_facts import process_facts
from ...model_spec import is_of_python_backend
from ..wording import first_of
from .checkup import Checkup
from .config_checks import all_are_optional, findings_in_config, mentions_shared_memory
from .findings import Finding
from .gpu_checks import find_client_gpus
from .machine_checks import findings_on_machine
from .model_checks import config_of, examine_model
from .server_checks import examine_registering, examine_server, finding_of_host, models_of
from .troubles.folder import ORDINARY_MODEL
from .troubles.model import OTHER_NAMESPACE
from .troubles.server import BAD_URL, OTHER_MACHINE, OUT_OF_TIME

__all__ = ["examine"]

_MOST_NAMED: Final = 20


def examine(url: str | Connectable, model: str | None = None) -> Checkup:
    """Examine a server, the way to it, and one model or all, within five seconds, whatever the server does."""
    checkup = Checkup()
    checkup.conclude(findings_on_machine(), "/dev/shm of this machine has room, and nothing is left behind there")
    try:
        driver = BlockingDriver(connect(url, None))
    except CallerError as error:
        checkup.add_findings(Finding(BAD_URL, str(error)))
        return checkup
    checkup.start_time()
    try:
        unknown = finding_of_host(driver.transport.host)
        if unknown is not None:
            checkup.add_findings(unknown)
        elif examine_server(driver, checkup):
            _examine_models(driver, checkup, model)
    finally:
        driver.close()
    return checkup


def _examine_models(driver: BlockingDriver, checkup: Checkup, wanted: str | None) -> None:
    models = models_of(driver, checkup, wanted)
    if models is None:
        return
    obstacle = examine_registering(driver, checkup)
    here, gpus = process_facts(), find_client_gpus()
    shares = False
    for number, (model, versions) in enumerate(models.items()):
        if checkup.is_over:
            checkup.add_findings(Finding(OUT_OF_TIME, f"not examined: {first_of([*models][number:], _MOST_NAMED)}"))
            break
        config = config_of(driver, checkup, model)
        if config is not None:
            if not is_of_python_backend(config):
                checkup.add_fine("it is no Python model: its tensors go through Triton", model)
                continue
            findings = findings_in_config(config, model)
            if not mentions_shared_memory(config) and not (wanted and all_are_optional(config)):
                findings = [Finding(ORDINARY_MODEL, "its configuration has nothing of this library's", model)]
            checkup.conclude(findings, "its configuration has nothing against the direct path", model)
            shares |= examine_model(driver, checkup, config, versions, here, gpus, declares=not findings)
    if obstacle is None:
        return
    if shares:
        checkup.add_fine("the server has a /dev/shm of its own: the path triton-shm is closed, and the direct one open")
    elif not any(finding.trouble in (OTHER_MACHINE, OTHER_NAMESPACE) for finding in checkup.findings):
        is_here = is_this_machine(driver.transport.host)
        checkup.add_findings(Finding(OTHER_NAMESPACE if is_here else OTHER_MACHINE, obstacle))
