"""The client's process: calls, and the pipe to the model's process."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy.typing as npt

from shm_backend_utils.memory import locks

from ..gpu import Gpu, LoadGpu
from ..report import CheckFailedError, require
from .model import Answer, serve
from .slots import DeviceSlot, Slot

_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_LET_GO_S: Final = 20.0
_PAUSE_S: Final = 0.01

_AnySlot = TypeVar("_AnySlot", bound=Slot)


class ModelProcess(contextlib.AbstractContextManager["ModelProcess"]):
    """A process that is started when it is needed, and anew when it has died."""

    def __init__(self, load_gpu: LoadGpu) -> None:
        self._load_gpu = load_gpu
        self._running: tuple[Any, Any] | None = None

    def infer(self, model: str, *parameters: Mapping[str, Any]) -> Answer:
        """Send a request, or several for one ``execute``, and return the answer; CheckFailedError if none comes."""
        _, connection = self._running or self._start()
        try:
            connection.send((model, parameters))
            if connection.poll(_ANSWER_S):
                answer: Answer = connection.recv()
                return answer
            why = f"the model's process has not answered for {_ANSWER_S:g} s"
        except (EOFError, OSError):
            why = "the model's process has died"
        self.kill()
        raise CheckFailedError(why)

    def counts(self) -> Counter[str]:
        """Return how often the process' runtime has done what, by the names of its methods."""
        return Counter(self.infer("")[1])

    def kill(self) -> None:
        if self._running is not None:
            process, connection = self._running
            self._running = None
            process.kill()
            connection.close()
            process.join()
            process.close()

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            process, connection = self._running
            connection.close()
            process.join(_ANSWER_S)
            self.kill()

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")  # a forked child can use no CUDA
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._load_gpu), daemon=True)
        process.start()
        theirs.close()
        self._running = process, ours
        with contextlib.suppress(EOFError):
            if ours.poll(_START_S) and ours.recv() == "ready":
                return self._running
        self.kill()
        raise CheckFailedError("the model's process did not start; what it wrote to standard error says why")


class Client(contextlib.AbstractContextManager["Client"]):
    def __init__(self, gpu: Gpu, model: ModelProcess) -> None:
        self.gpu = gpu  # this process'
        self.model = model
        self._given_up: list[Slot] = []

    def __exit__(self, *_: object) -> None:
        """Free all slots: models let go of them some seconds after they were given up."""
        try:
            self.wait_until_unmapped("identity", self._given_up)
        except BaseException:
            self.model.kill()  # whoever has the memory mapped must be gone before it is freed
            raise
        finally:
            for slot in self._given_up:
                slot.free()

    def slot(self, model: str, *shape: int, **more: Any) -> contextlib.AbstractContextManager[DeviceSlot]:
        return self.kept(DeviceSlot(self.gpu, model, shape, **more))

    @contextlib.contextmanager
    def kept(self, slot: _AnySlot) -> Iterator[_AnySlot]:
        """Have a slot for a block; it is given up then, and freed in the end."""
        self._given_up.append(slot)
        try:
            yield slot
            slot.unlink()
            self.let_go(slot.model)
        except BaseException:
            self.model.kill()
            self.gpu.destroy_stream()  # it may wait for what the model will never do
            slot.unlink()
            raise

    def infer(self, *slots: Slot) -> dict[str, Any]:
        """Make a request in each slot, for one ``execute``; they must succeed. Return the model's notes."""
        error, notes = self.model.infer(slots[0].model, *[slot.next_request() for slot in slots])
        require(not error, f"the model refused the request: {error}")
        for slot in slots:
            require(slot.is_answered, "the model has answered without finishing with the slot")
        return notes

    def check_output(self, slot: DeviceSlot, expected: npt.ArrayLike, otherwise: str) -> None:
        require(bool((self.gpu.download(slot.y) == expected).all()), otherwise)

    def refusal(self, slot: Slot, encoded: bytes | None = None, *words: str) -> str:
        """Make a request, with another table if one is given, which must be refused with these words. Return why."""
        error, _ = self.model.infer(slot.model, slot.next_request(encoded))
        require(bool(error), "the model has served it")
        return worded(error, *words)

    def let_go(self, model: str) -> None:
        """Make a request with memory of the host alone: a model that gets new memory lets go of what was given up."""
        slot = Slot(model)
        try:
            self.model.infer(model, slot.next_request())
        finally:
            slot.unlink()
            slot.free()

    def wait_until_unmapped(self, model: str, slots: Sequence[Slot]) -> None:
        """Give slots up and wait until the model has let go of them; raises CheckFailedError if it does not."""
        for slot in slots:
            slot.unlink()
        self.let_go(model)
        deadline = time.monotonic() + _LET_GO_S
        while any(locks.has_users(slot.region.segment.fileno()) for slot in slots):
            if time.monotonic() > deadline:
                raise CheckFailedError(f"the model has not let go of memory that was given up {_LET_GO_S:g} s ago")
            time.sleep(_PAUSE_S)


def worded(text: str, *words: str) -> str:
    """Return a reason, briefly; CheckFailedError unless all these words are in it."""
    for each in words:
        require(each in text, f"the reason does not say {each!r}: {text}")
    return text if len(text) <= 200 else f"{text[:200]}…"


Check = Callable[[Client], str | None]
"""Returns a detail for the report, or none; raises what the report understands."""
