"""What a client knows and has: models and their paths, memory, GPUs, registrations.

Each operation is a generator of :mod:`.steps`, for both clients.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from ..errors import CallerError, TensorError
from ..forks import forsake_in_children
from ..memory import reaper
from ..memory.cuda.access import CudaAccess
from ..memory.cuda.bank import DeviceBank
from ..memory.pool.options import PoolOptions
from ..memory.pool.pool import SlotPool
from ..protocol.call_layout import CallLayout
from .errors import InferenceError
from .explanation import ClientStats, Explanation, Tally
from .inputs.devices import Gpus, device_source
from .known_model import Catalog, KnownModel, tell_path
from .once import Once
from .paths.call import is_answer
from .paths.choice import PathChooser
from .paths.direct import DirectCall
from .paths.triton_shm import Registrations
from .settings import CallSettings
from .steps import Pause, Send, Steps
from .transports.messages import Codec
from .transports.transport import AsyncTransport, Transport

__all__ = ["ClientMemory", "Core"]


class ClientMemory:
    """A client's slots; CallerError if the options are something else."""

    def __init__(self, options: PoolOptions, cuda: CudaAccess) -> None:
        if not isinstance(options, PoolOptions):
            raise CallerError(f"pool is {options!r}; expected PoolOptions(max_bytes=...)")
        self.bank = DeviceBank(cuda, options.max_device_bytes)  # their memory on GPUs
        self.pool = SlotPool(options, self.bank.collect)
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def end_with(self, owner: object) -> None:
        """Abandon it when its owner is garbage, or when the interpreter exits."""
        self._finalizer = weakref.finalize(owner, _abandon, self.pool, self.bank)

    def abandon(self) -> None:
        """Close it from a finalizer; waits for a second at most."""
        _abandon(self.pool, self.bank)

    def end(self) -> None:
        """Close it. Twice is fine."""
        self.pool.close()
        self.bank.close()
        if self._finalizer is not None:
            self._finalizer.detach()


def _abandon(pool: SlotPool, bank: DeviceBank) -> None:
    pool.abandon()
    bank.abandon()


_CLOSING_S: Final = 5.0
_CLOSING_ROUND_S: Final = 0.02

T = TypeVar("T")


class Core:
    """One client's memory and knowledge; up to ``inline_bytes`` of tensors go in band, by default as the codec says."""

    codec: Codec  # from the first connection on, as the two that follow
    registrations: Registrations
    paths: PathChooser

    def __init__(self, memory: ClientMemory) -> None:
        options = memory.pool.options
        self.catalog = Catalog(options.head_room)
        self.tally = Tally()
        self.pool = memory.pool
        self.gpus = Gpus(memory.bank, options.lend_bytes)
        self.on_gpus = functools.partial(device_source, self.gpus)
        self.copied_from_gpus = functools.partial(device_source, self.gpus, lends=False)
        self.once = Once()
        self.is_forked = False  # a copy, in a forked child, of its parent's client
        self.is_closed = False  # or begins to be
        forsake_in_children(self)

    def connect(self, transport: Transport | AsyncTransport, inline_bytes: int | None) -> None:
        """Take note of the connection, before anything is asked by it."""
        codec = self.codec = self.catalog.codec = transport.codec
        self.registrations = Registrations(codec)
        inline_bytes = codec.inline_bytes if inline_bytes is None else inline_bytes
        self.paths = PathChooser(codec, transport.host, self.registrations, self.pool.options, inline_bytes)
        reaper.reap()

    def forsake(self) -> None:
        """Know that this is a copy, in a forked child, of its parent's client."""
        self.is_forked = True
        self.tally.forsake()

    @property
    def state(self) -> str:
        """For people: ``"open"``, ``"not connected yet"``, ``"closed"``, or ``"forked"``."""
        if self.is_forked or self.is_closed:
            return "forked" if self.is_forked else "closed"
        return "open" if hasattr(self, "codec") else "not connected yet"

    def rest_at_server(self) -> str | None:
        """Return, for a warning, what a client that nobody closes leaves at the server; None if it was closed."""
        if self.is_closed:
            return None
        kept = ": the server keeps the memory that it has registered there"
        return "" if self.registrations.is_empty else kept

    def check_server_answers(self, timeout_s: float) -> Steps[None]:
        """Raise ServerUnavailableError or DeadlineExceededError unless there is a server."""
        try:
            yield Send(self.codec.ask("model config"), timeout_s)
        except InferenceError as error:
            if not is_answer(error):
                raise  # else it has no model of that name, but it is there

    def fitting(self, settings: CallSettings, look: Callable[[KnownModel], T]) -> Steps[tuple[KnownModel, T]]:
        """Return a call's model and what ``look`` makes of it; if its tensors do not fit, of the model as it is now."""
        known = self.catalog.recall(settings.model, settings.version) or (yield from self.known_model(settings))
        while True:
            try:
                return known, look(known)
            except TensorError:
                renewed = yield from self.renew(known, settings)
                if renewed is known:
                    raise
                known = renewed

    def explain(self, model: str, version: str, timeout_s: float) -> Steps[Explanation]:
        """Check everything anew and tell which path a model's calls take, and why."""
        deadline = time.monotonic() + timeout_s
        self.paths.forget_server()
        known = yield from self.catalog.look_up(model, version, timeout_s)
        known.refusals.clear()
        known.sealed = None
        return (yield from self.paths.explain(known, deadline))

    def stats(self) -> ClientStats:
        """Return the figures so far."""
        return self.tally.stats(self.catalog.reasons, self.pool.wait_count, self.pool.status)

    def close(self) -> Steps[None]:
        """Remove the memory, and unregister what is registered.

        In this order: a registration that the server has not answered to finds no memory any more. The server may still
        be busy with requests that this client has given up; it is waited for, but not long.
        """
        self.is_closed = True
        self.pool.close()
        self.gpus.close()
        deadline = time.monotonic() + _CLOSING_S
        while (yield from self.registrations.drop(None, deadline)) and time.monotonic() < deadline:
            yield Pause(_CLOSING_ROUND_S)

    def path_of(self, known: KnownModel, settings: CallSettings, layout: CallLayout) -> Steps[str]:
        """Return the path of a call; raises as :meth:`.PathChooser.choose`. The user is told where that copies."""
        if known.explanation is None:
            yield from self.known_model(settings)
        path = yield from self.paths.choose(known, settings.path, settings.deadline)
        if settings.path == "auto" and path != DirectCall.path:
            size = math.inf if layout.lent else layout.end + sum(layout.device_byte_sizes)
            tell_path(known, path, known.reason, size, settings.origin)
        return path

    def known_model(self, settings: CallSettings, since: float = -math.inf) -> Steps[KnownModel]:
        """Return a call's model, with its paths, as the server has described it since a moment.

        Of many calls that ask for the same, one finds it out, and the others wait.
        """
        key = settings.model, settings.version

        def ask() -> Steps[KnownModel]:
            known = self.catalog.recall(*key)
            if known is None or known.seen < since:
                known = yield from self.catalog.look_up(*key, settings.left_s)
            if known.explanation is None:
                yield from self.paths.explain(known, settings.deadline)
            return known

        while True:
            known = yield from self.once.find(key, ask, settings.deadline)
            if known.seen >= since:  # else the call that asked had begun before
                return known

    def renew(self, outdated: KnownModel, settings: CallSettings) -> Steps[KnownModel]:
        """Return a model as it is after a call has failed: as another call has found it since, or as it is found now.

        It is ``outdated`` itself if nothing has changed.
        """
        known = self.catalog.known.get((settings.model, settings.version), outdated)
        return known if known is not outdated else (yield from self.known_model(settings, time.monotonic()))
