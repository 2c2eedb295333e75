"""Does this machine have shared memory? Is there a server, is it Triton, is it ready, and does it register regions?"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from ...client import server_calls
from ...client.errors import (
    DeadlineExceededError,
    InferenceError,
    MemoryRefusedError,
    ServerUnavailableError,
    TlsError,
    UnknownHostError,
)
from ...client.paths.triton_shm import Registrations
from ...client.steps import BlockingDriver, Steps
from ...client.transports.transport import is_this_machine
from ...errors import MachineError, ShmError, name_list
from ...memory import reaper
from ...memory.descriptors import PRIVATE
from ...memory.machine import available_bytes, memory_bytes
from ...memory.pool.slot import SlotRegion
from ...memory.shared_file import DEV_SHM, free_bytes, total_bytes
from ...model_spec import CARRIER_LINE
from ...protocol.layout import PAGE_SIZE
from ..shared_memory import find_pools, look_into_processes, with_users
from ..terminal import age, size
from .checkup import Checkup, Finding
from .troubles import Trouble

__all__ = [
    "examine_registering",
    "examine_server",
    "finding_of_error",
    "finding_of_host",
    "findings_on_machine",
    "models_of",
]

_MIB: Final = 2**20
_SMALL_BYTES: Final = 256 * _MIB  # a container of Docker's has 64 MiB by default
_FULL_SHARE: Final = 0.9
_ENOUGH_BYTES: Final = 1024 * _MIB  # with so much free, the share does not matter
_LITTLE_BYTES: Final = 128 * _MIB

_FIRST_S: Final = 2.0
_QUESTION_S: Final = 1.5
_LOOK_UP_S: Final = 2.0
_BY_ERROR: Final = (
    (UnknownHostError, Trouble.UNKNOWN_HOST),
    (TlsError, Trouble.TLS),
    (DeadlineExceededError, Trouble.NO_ANSWER),
    (InferenceError, Trouble.NOT_TRITON),
)
_OTHER_PROTOCOL: Final = ("speaks HTTP, and not gRPC", "does not speak HTTP", "as it should")
_READY: Final = "READY"
_UNLOADED: Final = "unloaded"
_LIBRARY: Final = "shm_backend_utils"
_LIBRARY_MISSING: Final = re.compile(rf"ModuleNotFoundError: No module named '?{_LIBRARY}\b")


def findings_on_machine() -> list[Finding]:
    """Look at ``/dev/shm``, its leftovers, and the size of memory. Changes nothing."""
    return [*_dev_shm(), *_left_behind(), *_memory()]


def _dev_shm() -> Iterator[Finding]:
    if not DEV_SHM.is_dir():
        yield Finding(Trouble.NO_DEV_SHM, f"{DEV_SHM} is missing, or not a folder")
        return
    if not os.access(DEV_SHM, os.W_OK | os.X_OK):
        yield Finding(Trouble.DEV_SHM_NOT_WRITABLE, f"user {os.geteuid()} may not write to {DEV_SHM}")
    total, free = total_bytes(), free_bytes()
    if total < _SMALL_BYTES:
        yield Finding(Trouble.DEV_SHM_SMALL, f"{DEV_SHM} has {size(total)}; expected {size(_SMALL_BYTES)} or more")
    if free < min(total * (1 - _FULL_SHARE), _ENOUGH_BYTES):
        yield Finding(Trouble.DEV_SHM_FULL, f"{DEV_SHM} has {size(free)} left of {size(total)}")


def _left_behind() -> Iterator[Finding]:
    stale = [region for region in reaper.scan() if not region.is_owner_alive]
    if stale:
        total, oldest = sum(region.byte_size for region in stale), max(region.age_s for region in stale)
        yield Finding(Trouble.STALE_REGIONS, f"{len(stale)} with {size(total)}, the oldest of them {age(oldest)} old")
    pools = find_pools()
    left = [pool for pool in with_users(pools, look_into_processes()) if pool.is_left_behind] if pools else []
    if left:
        total = sum(pool.byte_size for pool in left)
        yield Finding(Trouble.LEFTOVER_POOLS, f"{len(left)} of {len(pools)}, with {size(total)}")


def _memory() -> Iterator[Finding]:
    left = available_bytes()
    if left < _LITTLE_BYTES:
        yield Finding(Trouble.LITTLE_MEMORY, f"{size(max(left, 0))} of {size(memory_bytes())} is still available")


def finding_of_host(host: str) -> Finding | None:
    """Return the finding for a host name that cannot be resolved in time; None if it is known."""
    found: list[BaseException | None] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None)
            found.append(None)
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name="doctor look-up", daemon=True)
    thread.start()
    thread.join(_LOOK_UP_S)
    if not found:
        return Finding(Trouble.UNKNOWN_HOST, f"{host} was not resolved within {_LOOK_UP_S:.0f} s")
    return None if found[0] is None else Finding(Trouble.UNKNOWN_HOST, f"{host}: {found[0]}")


def finding_of_error(error: ShmError) -> Finding:
    """Return the finding for a server that does not answer, or not as Triton does."""
    text = str(error.message()) if isinstance(error, InferenceError | ServerUnavailableError) else str(error)
    speaks_another = any(sign in text for sign in _OTHER_PROTOCOL)
    otherwise = Trouble.WRONG_PORT if speaks_another else Trouble.SERVER_NOT_REACHABLE
    return Finding(next((trouble for kind, trouble in _BY_ERROR if isinstance(error, kind)), otherwise), text)


def examine_server(driver: BlockingDriver, checkup: Checkup) -> bool:
    """Find out whether Triton answers; return whether it makes sense to go on."""
    codec, address = driver.transport.codec, driver.transport.address
    try:
        answer = driver.run(server_calls.ask(codec, checkup.until(_FIRST_S), "server metadata"))
        is_ready = driver.run(server_calls.is_so(codec, checkup.until(_QUESTION_S), "server ready"))
    except ShmError as error:
        checkup.findings.append(finding_of_error(error))
        return False
    name, version = answer.get("name"), answer.get("version")
    if not (isinstance(name, str) and isinstance(version, str) and isinstance(answer.get("extensions"), list)):
        checkup.add(Trouble.NOT_TRITON, f"{address} answers, but its metadata lacks a name, a version or extensions")
        return False
    checkup.add_fine(f"{name} {version} answers at {address}")
    if is_ready:
        checkup.add_fine("it is ready")
    else:
        checkup.add(Trouble.SERVER_NOT_READY, "the server says that it is not ready")
    return True


def models_of(driver: BlockingDriver, checkup: Checkup, wanted: str | None) -> dict[str, list[str]] | None:
    """Return the models to examine, each with its ready versions; None if the server no longer answers."""
    codec = driver.transport.codec
    try:
        answer = driver.run(server_calls.ask(codec, checkup.until(_QUESTION_S), "repository index"))
    except (DeadlineExceededError, ServerUnavailableError) as error:
        checkup.findings.append(finding_of_error(error))
        return None
    except ShmError as error:  # a proxy forbids the request, or the server is old
        if wanted is None:
            found = str(error.message() if isinstance(error, InferenceError) else error)
            checkup.add(Trouble.NO_INDEX, found)
        return {} if wanted is None else {wanted: [""]}
    models = answer.get("models")
    index = [each for each in models if _is_of_model(each)] if isinstance(models, list) else []
    named = [each for each in index if wanted is None or each["name"] == wanted]
    if wanted is not None and not named:
        there = name_list(wanted, sorted({each["name"] for each in index}))
        checkup.add(Trouble.NO_SUCH_MODEL, f"there is no model {wanted!r}; there are: {there}", wanted)
    ready: dict[str, list[str]] = {}
    for each in sorted(named, key=lambda each: str(each["name"])):
        if each.get("state") == _READY:
            ready.setdefault(each["name"], []).append(_version_of(each))
    findings = _not_loaded(named, ready, wanted)
    checkup.findings += findings
    if wanted is None and not ready and not findings:
        checkup.add(Trouble.NO_MODELS, f"{len(index)} in its repository, none of them loaded")
    return ready


def examine_registering(driver: BlockingDriver, checkup: Checkup) -> str | None:
    """Let the server register a page of this process; return its error if it could not open the page, else None."""
    try:
        page = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, PRIVATE)
    except (MachineError, OSError) as error:
        checkup.add(Trouble.NO_OWN_REGION, str(error))
        return None
    registrations = Registrations(driver.transport.codec)

    def tried() -> Steps[None]:
        try:
            yield from registrations.add(page, checkup.until(_QUESTION_S))
        finally:  # even after an interrupt, the server may have registered it
            yield from registrations.drop([page.key], checkup.until(_QUESTION_S))

    try:
        driver.run(tried())
    except MemoryRefusedError as error:
        text = str(error.message())
        if "Unable to open" in text or not is_this_machine(driver.transport.host):
            return text
        checkup.add(Trouble.CLIENT_SHM_DISABLED, text)
        return None
    except ShmError as error:  # it does not show on which machine the server is
        checkup.findings.append(finding_of_error(error))
        return None
    finally:
        page.destroy()
    checkup.add_fine("the server registers memory of this process")
    return None


def _is_of_model(entry: Any) -> bool:
    """Return whether an entry of the index has a name that a request can carry."""
    name = entry.get("name") if isinstance(entry, Mapping) else None
    try:
        return isinstance(name, str) and name.encode() != b""
    except UnicodeEncodeError:  # JSON may have half of a surrogate pair
        return False


def _version_of(entry: Mapping[str, Any]) -> str:
    """Return the version of an entry of the index; if it is no number, an empty string, which means any version."""
    version = str(entry.get("version") or "")
    return version if version.isdecimal() and version.isascii() else ""


def _not_loaded(index: Iterable[Mapping[str, Any]], ready: Collection[str], wanted: str | None) -> list[Finding]:
    findings = []
    for each in index:
        name, reason = each["name"], str(each.get("reason") or "")
        has_reason = reason not in ("", _UNLOADED)
        if each.get("state") == _READY or not (has_reason or (wanted is not None and name not in ready)):
            continue
        line = " ".join(reason.split())
        trouble = Trouble.MODEL_NOT_LOADED
        if _LIBRARY_MISSING.search(line):
            trouble = Trouble.LIBRARY_MISSING
        elif CARRIER_LINE in line:
            trouble = Trouble.NO_SHM_INPUT
        elif ("is not optional" in line and _LIBRARY in line) or "optional: true" in line:
            trouble = Trouble.REQUIRED_INPUTS
        version, state = _version_of(each), str(each.get("state") or "not loaded")
        which = f"version {version} is " if version else ""
        findings.append(Finding(trouble, f"{which}{state}: {line or 'the server gives no reason'}", name))
    return findings
