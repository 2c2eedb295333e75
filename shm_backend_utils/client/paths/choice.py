"""The choice of a model's path, and its explanation: named checks, and requests that ``model.py`` never sees."""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ...dtypes import BY_NAME
from ...errors import NOT_OPENED, CallerError, MachineError, PeerError, ProbedError, StaleRequestError, code_in
from ...memory.descriptors import PRIVATE
from ...memory.managed import RegionKind
from ...memory.pool.options import PoolOptions
from ...memory.pool.slot import SlotRegion
from ...model_spec import PATHS_PARAMETER, UIDS_PARAMETER, ModelSpec
from ...protocol.call_layout import obstacle_in_tensors
from ...protocol.layout import PAGE_SIZE
from ...protocol.probe import NONCE_LENGTH, digest_of, encode_probe
from ...protocol.spans import InputSpan, OutputSpan
from ..errors import InferenceError, MemoryRefusedError, PathUnavailableError
from ..explanation import Check, Explanation
from ..known_model import KnownModel
from ..options import RequestOptions
from ..steps import Send, SendForStream, Steps, offloaded
from ..transports.messages import Codec
from ..transports.transport import is_this_machine
from .call import is_answer
from .direct import DirectCall
from .triton_shm import InlineCall, RegisteredCall, Registrations

__all__ = ["PathChooser", "ProbeAnswer", "ask_session", "probe_model"]

_LOG: Final = logging.getLogger(__name__)
_DIRECT: Final = DirectCall.path
_TRITON_SHM: Final = RegisteredCall.path
_INLINE: Final = InlineCall.path
_BY_PREFERENCE: Final = (_DIRECT, _TRITON_SHM, _INLINE)
_SEALED: Final = "sealed memory?"
_NEVER_BEGUN: Final = 1
_ANOTHER_MACHINE: Final = (
    "another machine, which shares no memory with this one (containers: --ipc=host, or one shared volume)"
)


class PathChooser:
    """Chooses a path for each model of one server. It tries a path once, and remembers the outcome."""

    def __init__(
        self, codec: Codec, host: str, registrations: Registrations, options: PoolOptions, inline_bytes: int
    ) -> None:
        self._codec = codec
        self._host = host
        self._registrations = registrations
        self._options = options
        self._inline_bytes = inline_bytes
        self._of_server: tuple[Check, ...] | None = None

    def choose(self, model: KnownModel, wanted: str, deadline: float) -> Steps[str]:
        """Return a call's path; PathUnavailableError if the wanted path, or with ``"auto"`` every path, is closed."""
        explanation = model.explanation or (yield from self.explain(model, deadline))
        path = explanation.path if wanted == "auto" else wanted
        if path is None or not explanation.open(path):
            obstacles = explanation.obstacles(_DIRECT if path is None else path)
            raise PathUnavailableError(
                f"model {model.spec.name!r} cannot be called on the path {wanted!r}: "
                + "; ".join(check.detail for check in obstacles)
            )
        return path

    def explain(self, model: KnownModel, deadline: float) -> Steps[Explanation]:
        """Explain which path a model's calls take; run the checks whose results are not known yet."""
        spec = model.spec
        of_server = self._of_server or (yield from self._check_server(deadline))
        of_model = _check_model(spec)
        of_model += [Check(f"tried {it}?", False, f"it was tried: {why}", (it,)) for it, why in model.refusals.items()]
        sealed: Check | None = None  # None if the user excludes sealed memory, or no call would use it
        if self._options.region != "system" and Explanation(spec.name, None, "", (*of_model,)).open(_DIRECT):
            sealed = model.sealed or (yield from self._try_sealed(model, of_server[0].outcome is not False, deadline))
            model.sealed = None if sealed.is_temporary else sealed
            if sealed.outcome:
                shown = functools.partial(replace, outcome=True, detail="the model has opened memory of this user")
                of_model = [shown(check) if check.outcome is None else check for check in of_model]
            of_model.append(sealed)
        is_sealed = sealed is not None and sealed.outcome is not False
        of_shm = [
            replace(check, needed_by=tuple({*check.needed_by} - {_DIRECT}), is_temporary=False) if is_sealed else check
            for check in of_server
        ]
        checks = (*of_shm, *of_model)
        unexplained = Explanation(spec.name, None, "", checks)
        path = next((path for path in _BY_PREFERENCE if unexplained.open(path)), None)
        better = _BY_PREFERENCE[: _BY_PREFERENCE.index(path)] if path else _BY_PREFERENCE
        reasons = [check.detail for check in checks if check.outcome is False and set(better) & {*check.needed_by}]
        unknown = [check for check in checks if check.outcome is None and (check is sealed or path in check.needed_by)]
        if unknown and not reasons:
            reasons = [f"only a call can tell: {'; '.join(check.detail for check in unknown)}"]
        is_direct = path == _DIRECT and not model.has_strings
        prefers_inline = is_direct and self._inline_bytes > 0 and unexplained.open(_INLINE)
        if prefers_inline:
            checks = (*checks, self._check_small(spec))
        if path == _DIRECT:
            detail = (
                f"the model uses those of {self._options.lend_bytes:,} bytes or more in place, and smaller ones are "
                "copied on the GPU (PoolOptions.lend_bytes); those of prepared calls are always used in place"
            )
            checks = (*checks, Check("tensors on GPUs?", True, detail, ()))
        needs_grpcio = self._codec.needs_grpcio
        if needs_grpcio is not None:
            slower = f"grpcio carries the requests, which takes longer, because of {needs_grpcio}"
            detail = slower if needs_grpcio else "the client's own sockets carry the requests"
            checks = (*checks, Check("own sockets?", not needs_grpcio, detail, ()))
        explanation = Explanation(spec.name, path, "; ".join(reasons) or "nothing prevents it", checks)
        model.reason = explanation.reason
        if model.explanation != explanation:
            _LOG.info("model %r takes the path %s: %s", spec.name, path, explanation.reason)
        if not any(check.is_temporary for check in checks):
            self._of_server = of_server
            model.explanation = explanation
            model.path = path
            model.open_paths = frozenset(filter(unexplained.open, _BY_PREFERENCE))
            model.kind = RegionKind.SEALED if is_sealed else RegionKind.SYSTEM
            model.inline_end = model.data_begin + self._inline_bytes if prefers_inline else 0
        return explanation

    def _check_small(self, spec: ModelSpec) -> Check:
        open_sizes = [name for name, output in spec.outputs.items() if output.row_byte_size is None]
        condition = f", if the call's outputs= has the size of {', '.join(open_sizes)}" if open_sizes else ""
        detail = (
            f"calls whose tensors take up to {self._inline_bytes:,} bytes together go inline{condition}, which is "
            "faster for them; create the client with inline_bytes=0 to send them direct"
        )
        return Check("small calls?", True, detail, ())

    def refuse(self, model: KnownModel, path: str, reason: str, kind: RegionKind = RegionKind.SYSTEM) -> None:
        """Record that a path is closed for a model, or only its sealed memory if the model refused that."""
        if path == _DIRECT and self._options.region == "auto" and kind is RegionKind.SEALED:
            if model.kind is RegionKind.SEALED:
                _LOG.warning("calls of model %r take memory in /dev/shm from now on: %s", model.spec.name, reason)
            model.sealed = Check(_SEALED, False, f"it was tried: {reason}", ())
        else:
            model.refusals[path] = reason
        model.explanation = model.path = None
        model.open_paths = frozenset()
        model.inline_end = 0

    def forget_server(self) -> None:
        """Forget the results of the server's checks: another server may have taken its place."""
        self._of_server = None

    def _try_sealed(self, model: KnownModel, is_here: bool, deadline: float) -> Steps[Check]:
        """Check whether a model can open sealed memory, by a stale request that ``model.py`` does not see."""
        needed_by = (_DIRECT,) if self._options.region == "sealed" else ()
        found = functools.partial(Check, _SEALED, needed_by=needed_by)
        if not is_here:
            return found(False, "models fetch it through a socket, which works only on the same machine")
        if model.spec.sequences:  # a probe would wait for the end of another sequence, which may be this client's
            return found(None, "the model takes sequences, so it was not tried")
        try:
            region = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, self._options.access, kind=RegionKind.SEALED)
        except MachineError as error:
            return found(False, str(error), is_temporary=True)
        try:
            slot = region.slots[0].address_pattern % model.spec.name, _NEVER_BEGUN
            message = yield from ask_session(self._codec, model.spec, slot, deadline, model.version)
        except CallerError as error:  # a decoupled model needs a stream, which HTTP lacks
            return found(None, str(error))
        finally:
            region.destroy()
        code, outcome, reason = code_in(message or ""), None, f"the request that tries it has failed: {message}"
        if message is None:
            reason = "the model has answered, but did not say"
        elif code == StaleRequestError.code:
            outcome, reason = True, "the model has fetched some by a socket; it cannot be truncated or left behind"
            reason += "; memory on GPUs goes the same way, or by CUDA IPC if a GPU cannot do that"
        elif code in NOT_OPENED:
            outcome, reason = False, f"the model could not fetch it: {message}"
        return found(outcome, reason)

    def _check_server(self, deadline: float) -> Steps[tuple[Check, ...]]:
        shared = (_DIRECT, _TRITON_SHM)
        host = self._host
        here = Check("same machine?", True, f"{host} is this machine", shared)
        elsewhere = Check("same machine?", False, f"{host} is {_ANOTHER_MACHINE}", shared)
        is_here = True  # assumed if the look-up of the host fails below
        try:
            is_here = yield from offloaded(
                lambda: is_this_machine(host), deadline, "the server's host name was being looked up"
            )
            probe = SlotRegion(PAGE_SIZE, 1, PAGE_SIZE, self._options.access)
        except MachineError as error:
            obstacle = Check("memory to share?", False, str(error), shared, is_temporary=True)
            return (here, obstacle) if is_here else (elsewhere,)
        try:
            yield from self._registrations.add(probe, deadline)
            yield from self._registrations.drop([probe.key], deadline)
        except MemoryRefusedError as error:
            return (here, *_refused_registration(str(error))) if is_here else (elsewhere,)
        finally:
            probe.destroy()
        return (
            here if is_here else Check("same machine?", True, f"{host} shares memory with this machine", shared),
            Check("region registered?", True, "the server has opened memory of this process", shared),
            Check("server flag?", True, "the server registers clients' memory", (_TRITON_SHM,)),
        )


def _refused_registration(message: str) -> tuple[Check, ...]:
    if "Unable to open" in message:
        detail = (
            "the server cannot open memory of this process: either they do not share /dev/shm (containers: --ipc=host, "
            "or one shared volume), or they run as different users (PoolOptions(access=...))"
        )
        return (Check("region registered?", False, detail, (_DIRECT, _TRITON_SHM)),)
    detail = "the server registers no clients' memory; since 26.04 it must be started with --allow-client-shm=true"
    return (
        Check(
            "region registered?", None, "only the model can tell whether it opens memory of this process", (_DIRECT,)
        ),
        Check("server flag?", False, f"{detail} (it says: {message})", (_TRITON_SHM,)),
    )


def _check_model(spec: ModelSpec) -> list[Check]:
    checks = []
    for path in (_TRITON_SHM, _INLINE):
        if spec.paths is not None and path not in spec.paths:
            detail = f"{PATHS_PARAMETER} of model {spec.name!r} does not name {path}"
            checks.append(Check(f"declares {path}?", False, detail, (path,)))
    obstacle = spec.obstacle_in_paths()
    checks.append(Check("declares direct?", obstacle is None, obstacle or "it does", (_DIRECT,)))
    if spec.is_ensemble:
        return checks  # the remaining checks concern the models of its steps
    obstacle = spec.obstacle_in_inputs()
    checks.append(Check("inputs optional?", obstacle is None, obstacle or "they are", (_DIRECT,)))
    obstacle = obstacle_in_tensors(spec)
    if obstacle is not None:
        checks.append(Check("tensors fit a slot?", False, obstacle, (_DIRECT,)))
    checks.append(_check_user(spec))
    return checks


def _check_user(spec: ModelSpec) -> Check:
    name, me = "user allowed?", str(os.geteuid())
    if spec.allowed_uids is None:
        return Check(name, None, f"{UIDS_PARAMETER} is not set: only root and the model's user are", (_DIRECT,))
    words = [word.strip() for word in spec.allowed_uids.split(",")]
    if words == ["any"] or me in words:
        return Check(name, True, f"{UIDS_PARAMETER} names user {me}", (_DIRECT,))
    return Check(name, False, f"add user {me} to the parameter {UIDS_PARAMETER} of model {spec.name!r}", (_DIRECT,))


_REPORT_ROOM: Final = 4 * PAGE_SIZE


class ProbeAnswer(NamedTuple):
    report: dict[str, Any] | None  # the items that ``docs/protocol.md`` lists, in JSON's types; None without a report
    refusal: str  # the error text of the model or the server; empty if the model executed the request

    @property
    def code(self) -> str:
        """The refusal's code, such as ``shm:gone``; empty if the refusal has no code of this package."""
        return code_in(self.refusal)


def ask_session(
    codec: Codec, spec: ModelSpec, slot: tuple[str, int], deadline: float, version: str = ""
) -> Steps[str | None]:
    """Send a model a request without tensors; return the text of its refusal, or None if it executed the request."""
    options = RequestOptions(model_version=version)
    if spec.sequences:
        number = secrets.randbits(48) + 1
        options["sequence_id"] = str(number) if spec.names_sequences else number
        options["sequence_start"] = options["sequence_end"] = True
    message = codec.infer(spec.name, options, batch_size=1 if spec.max_batch_size else None, slot=slot)
    try:
        yield SendForStream(message, deadline) if spec.is_decoupled else Send(message, deadline)
    except InferenceError as error:
        if not is_answer(error):
            raise
        return str(error.message())
    return None


def probe_model(
    codec: Codec, spec: ModelSpec, kind: RegionKind, deadline: float, *, with_gpus: bool
) -> Steps[ProbeAnswer]:
    """Have a model read a nonce in new memory, and write its report there. ``model.py`` does not see the request."""
    region = SlotRegion(PAGE_SIZE + _REPORT_ROOM, 1, PAGE_SIZE, PRIVATE, kind=kind)
    try:
        nonce = os.urandom(NONCE_LENGTH)
        begin, slot = region.data_offset, region.slots[0]
        report = begin + PAGE_SIZE
        room = region.byte_size - report
        region.buffer[begin : begin + NONCE_LENGTH] = nonce
        place = InputSpan(BY_NAME["UINT8"], (NONCE_LENGTH,), 0, begin, NONCE_LENGTH)
        generation = slot.begin(encode_probe(place, OutputSpan(0, report, room), with_gpus=with_gpus))
        address = slot.address_pattern % spec.name, generation
        answer = ProbeAnswer(None, (yield from ask_session(codec, spec, address, deadline)) or "")
        if answer.code != ProbedError.code:
            return answer
        if not slot.is_completed:
            raise PeerError(f"model {spec.name!r} says that it has answered a probe, but has not written its report")
        return ProbeAnswer(_read(bytes(region.buffer[report : report + room]), nonce, spec.name), answer.refusal)
    finally:
        region.destroy()


def _read(data: bytes, nonce: bytes, model: str) -> dict[str, Any]:
    try:
        report: Any = json.loads(data.partition(b"\0")[0])
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or report.get("digest") != digest_of(nonce):
        raise PeerError(f"model {model!r} has answered a probe, but its report is broken, or answers another probe")
    return report
