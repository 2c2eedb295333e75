"""Decides which requests an instance executes together. Has no threads: those that bring requests do the work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ...errors import CallerError
from ..emulator import Delivery
from .requests import Answer
from .stub import Receiver

__all__ = ["Batcher", "Instance", "Pending"]

_DRAIN_S: Final = 30.0


class Instance(Protocol):
    """An instance of a model: a :class:`.Stub`, or one in a child process. It raises :class:`.StubError`."""

    def load(self) -> None:
        """Import model.py."""

    def auto_complete(self, config: str) -> str | None:
        """Return the configuration as the model completes it, None if it does not; each is JSON."""

    def initialize(self, args: Mapping[str, str], is_decoupled: bool) -> None:
        """Call the model's ``initialize``."""

    def execute(self, deliveries: Sequence[Delivery], receivers: Sequence[Receiver]) -> None:
        """Call the model's ``execute``, and return when it has."""

    def is_ready(self) -> bool:
        """Return whether it is alive, and the model's ``is_ready``, if it has one, returns True."""

    def finalize(self) -> None:
        """Call the model's ``finalize``, and end."""


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits for an instance."""

    delivery: Delivery
    batch_size: int
    answer: Answer
    is_taken: bool = False  # an instance has it


class Batcher:
    """Gives the requests of one model to its instances, alone or together, in the order in which they came."""

    def __init__(
        self,
        config: Any,
        instances: Sequence[Instance],
        execute: Callable[[Instance, Sequence[Pending]], None],
    ) -> None:
        self._batches = config.max_batch_size > 0 and config.HasField("dynamic_batching")
        self._most = int(config.max_batch_size)
        self._preferred = sorted(config.dynamic_batching.preferred_batch_size, reverse=True)
        self._delay_s = config.dynamic_batching.max_queue_delay_microseconds / 1e6
        self._ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        self._name = config.name
        self._execute = execute
        self._changed = threading.Condition(threading.Lock())
        self._idle = list(reversed(instances))
        self._busy: list[int] = []
        self._all = len(instances)
        self._queue: deque[Pending] = deque()

    def run(self, pending: Pending) -> None:
        """Return when an instance has executed a request, or another thread has taken it to one."""
        with self._changed:
            self._queue.append(pending)
            if self._delay_s:
                self._changed.notify_all()
        while self._do_some_unless_taken(pending):
            pass

    def run_together(self, batch: Sequence[Pending]) -> None:
        """Have an instance execute these requests, and no others; CallerError if a server would never batch them."""
        obstacle = self._obstacle(batch)
        if obstacle is not None:
            raise CallerError(obstacle)
        with self._changed:
            while not self._idle:
                self._check_is_not_ours()
                self._changed.wait()
            instance = self._take_idle()
        self._do(instance, batch)

    def drain(self) -> None:
        """Wait until no instance executes anything, but not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) == self._all, _DRAIN_S)

    def _obstacle(self, batch: Sequence[Pending]) -> str | None:
        if len(batch) == 1:
            return None
        if not self._batches:
            return (
                f"model {self._name!r} gets one request at a time; for several write max_batch_size: 8 and "
                "dynamic_batching { } into its config.pbtxt"
            )
        total = sum(pending.batch_size for pending in batch)
        if total > self._most:
            return (
                f"these requests have {total} rows together, but max_batch_size of model {self._name!r} is {self._most}"
            )
        if any(self._kind(pending) != self._kind(batch[0]) for pending in batch):
            return (
                f"these requests of model {self._name!r} differ in their inputs, or in the shapes of these, "
                "so a server never batches them; see allow_ragged_batch in Triton's model_configuration.md"
            )
        return None

    def _do_some_unless_taken(self, pending: Pending) -> bool:
        """Execute the first requests in the queue; return False, and do nothing, if this request was taken."""
        with self._changed:
            while not self._idle and not pending.is_taken:
                self._check_is_not_ours()
                self._changed.wait()
            if pending.is_taken:
                return False
            instance = self._take_idle()
            batch = self._form()
        self._do(instance, batch)
        return True

    def _do(self, instance: Instance, batch: Sequence[Pending]) -> None:
        try:
            if batch:
                self._execute(instance, batch)
        finally:
            with self._changed:
                self._busy.remove(threading.get_ident())
                self._idle.append(instance)
                self._changed.notify_all()

    def _take_idle(self) -> Instance:
        self._busy.append(threading.get_ident())
        return self._idle.pop()

    def _check_is_not_ours(self) -> None:
        """Raise RecursionError if this thread, which finds no idle instance, is in ``execute`` of one."""
        if threading.get_ident() in self._busy:
            raise RecursionError(
                f"model {self._name!r} calls itself, and has no other idle instance: on a server this waits "
                "for ever; add an instance in instance_group"
            )

    def _form(self) -> list[Pending]:
        """Take one batch from the queue; called with the lock, which it releases while it waits."""
        if not self._queue:
            return []
        if not self._batches:
            return [self._taken()]
        deadline = time.monotonic() + self._delay_s
        while True:
            sizes = self._sizes()
            count = next((sizes.index(size) + 1 for size in self._preferred if size in sizes), 0)
            left = deadline - time.monotonic()
            is_full = len(sizes) < len(self._queue)
            if count or is_full or left <= 0 or not sizes:
                return [self._taken() for _ in range(count or len(sizes))]
            self._changed.wait(left)

    def _sizes(self) -> list[int]:
        """Return how many rows the first request has, the first two, and so on, as far as they fit together."""
        sizes: list[int] = []
        total = 0
        kind = None
        for pending in self._queue:
            if sizes and self._kind(pending) != kind:
                break
            kind = self._kind(pending)
            total += pending.batch_size
            if total > self._most:
                break
            sizes.append(total)
        return sizes

    def _kind(self, pending: Pending) -> dict[str, tuple[int, ...] | None]:
        return {name: None if name in self._ragged else array.shape[1:] for name, _, array in pending.delivery.inputs}

    def _taken(self) -> Pending:
        pending = self._queue.popleft()
        pending.is_taken = True
        return pending
