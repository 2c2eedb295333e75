"""Find the obstacles to the direct path, and name the remedy of each."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ...client.steps import BlockingDriver
from ...client.transports.transport import Connectable, connect, is_this_machine
from ...errors import CallerError
from ...memory.machine import process_facts
from ...model_spec import is_of_python_backend
from ..terminal import printable
from .checkup import Checkup, Finding
from .config_checks import all_are_optional, findings_in_config, mentions_shared_memory
from .folder_checks import findings_in_folder
from .model_checks import config_of, examine_model, find_client_gpus
from .server_checks import examine_registering, examine_server, finding_of_host, findings_on_machine, models_of
from .troubles import Trouble

__all__ = ["add_arguments", "as_json", "examine", "run"]

_URL: Final = "localhost:8001"
_USAGE: Final = 2
_MOST_NAMED: Final = 20
_LONGEST: Final = 1000
_MARKS: Final = {True: "✗", False: "!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help=f"HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP (default: {_URL})",
    )
    parser.add_argument("--model", metavar="M", help="examine this model alone (default: all that are ready)")
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="examine a model's folder, or a repository of models, instead of a server",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Examine, and print the findings; return 1 if one is fatal, 2 if the arguments contradict each other."""
    if arguments.model_dir is not None:
        if arguments.url is not None or arguments.model is not None:
            print("doctor: --model-dir needs no server; give neither URL nor --model", file=sys.stderr)
            return _USAGE
        subject = str(arguments.model_dir)
        checkup = Checkup()
        checkup.conclude(findings_in_folder(arguments.model_dir), f"nothing is wrong in {subject}")
    else:
        subject = arguments.url or _URL
        checkup = examine(subject, arguments.model)
    print(as_json(checkup, subject) if arguments.json else as_text(checkup), flush=True)
    return checkup.exit_status


def examine(url: str | Connectable, model: str | None = None) -> Checkup:
    """Examine a server, the way to it, and one model or all, within five seconds, whatever the server does."""
    checkup = Checkup()
    checkup.conclude(findings_on_machine(), "/dev/shm of this machine has room, and nothing is left behind there")
    try:
        driver = BlockingDriver(connect(url, None))
    except CallerError as error:
        checkup.add(Trouble.BAD_URL, str(error))
        return checkup
    checkup.start_time()
    try:
        unknown = finding_of_host(driver.transport.host)
        if unknown is not None:
            checkup.findings.append(unknown)
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
            late = [*models][number:]
            more = f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
            checkup.add(Trouble.OUT_OF_TIME, f"not examined: {', '.join(late[:_MOST_NAMED])}{more}")
            break
        config = config_of(driver, checkup, model)
        if config is not None and not is_of_python_backend(config):
            checkup.add_fine("it is not a Python model: its tensors go through Triton", model)
        elif config is not None:
            findings = findings_in_config(config, model)
            if not mentions_shared_memory(config) and not (wanted and all_are_optional(config)):
                findings = [Finding(Trouble.ORDINARY_MODEL, "no parameter and no input of this library", model)]
            checkup.conclude(findings, "nothing in its configuration prevents the direct path", model)
            shares |= examine_model(driver, checkup, config, versions, here, gpus, declares=not findings)
    if obstacle is None:
        return
    if shares:
        checkup.add_fine("the server has a /dev/shm of its own: the path triton-shm is closed, the direct path is open")
    elif not any(finding.trouble in (Trouble.OTHER_MACHINE, Trouble.OTHER_NAMESPACE) for finding in checkup.findings):
        is_here = is_this_machine(driver.transport.host)
        checkup.add(Trouble.OTHER_NAMESPACE if is_here else Trouble.OTHER_MACHINE, obstacle)


def as_json(checkup: Checkup, subject: str) -> str:
    """Return one line of JSON: ``subject``, ``healthy``, ``fine`` and ``findings``."""
    document: dict[str, Any] = {
        "subject": subject,
        "healthy": checkup.exit_status == 0,
        "fine": [{"model": model, "what": line} for model, line in checkup.fine],
        "findings": [
            {
                "code": finding.trouble.code,
                "model": finding.model,
                "fatal": finding.trouble.is_fatal,
                "what": finding.trouble.what,
                "found": finding.found,
                "remedy": finding.trouble.remedy,
            }
            for finding in checkup.findings
        ],
    }
    return json.dumps(document)


def as_text(checkup: Checkup) -> str:
    """Return the findings as lines: first those of the server and the machine, then those of each model."""
    by_model: defaultdict[str, list[str]] = defaultdict(list)
    for model, line in checkup.fine:
        by_model[model].append(f"✓ {_one_line(line)}")
    for finding in checkup.findings:
        by_model[finding.model] += _lines_of(finding)
    lines: list[str] = []
    for model, texts in sorted(by_model.items()):
        lines += [f"model {_one_line(model)}"] if model else []
        lines += [f"{'  ' if model else ''}{line}" for line in texts]
    fatal = sum(finding.trouble.is_fatal for finding in checkup.findings)
    advice = len(checkup.findings) - fatal
    lines.append(f"{_count(fatal, 'trouble')}, {_count(advice, 'piece')} of advice")
    return "\n".join(lines)


def _lines_of(finding: Finding) -> Iterator[str]:
    trouble = finding.trouble
    yield f"{_MARKS[trouble.is_fatal]} {trouble.code}: {trouble.what}"
    yield f"    found:  {_one_line(finding.found)}"
    yield f"    remedy: {trouble.remedy}"


def _one_line(text: str) -> str:
    """Return a server's text as one line of limited length, without control characters of terminals."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
