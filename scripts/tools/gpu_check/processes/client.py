"""The client's process: calls, and the pipe to the model's process."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from shm_backend_utils.gpu.arrays.device_array import DeviceArray

from ..gpu import Gpu, LoadGpu
from ..report import CheckFailedError, require
from .model import Answer, serve
from .slots import DeviceSlot, HostSlot, LentSlot, Slot

_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_LET_GO_S: Final = 20.0
_PAUSE_S: Final = 0.01

_AnySlot = TypeVar("_AnySlot", bound=Slot)


class ModelProcess:
    """A process that is started when it is needed, and anew when it has died. A context manager."""

    def __init__(self, load_gpu: LoadGpu) -> None:
        self._load_gpu = load_gpu
        self._running: tuple[Any, Any] | None = None

    def infer(self, model: str, *parameters: str) -> Answer:
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
        return Counter(self.infer("").notes)

    def kill(self) -> None:
        """End it at once."""
        if self._running is not None:
            self._running[0].kill()
            self._end()

    def __enter__(self) -> ModelProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running[1].close()
            self._running[0].join(_ANSWER_S)
            self.kill()

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")  # a forked child can use no CUDA
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._load_gpu), daemon=True)
        process.start()
        theirs.close()
        self._running = process, ours
        try:
            if ours.poll(_START_S) and ours.recv() == "ready":
                return self._running
        except EOFError:
            pass
        self.kill()
        raise CheckFailedError("the model's process did not start; what it wrote to standard error says why")

    def _end(self) -> None:
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.join()
            process.close()


class Client:
    """Calls of the check. A context manager."""

    def __init__(self, gpu: Gpu, model: ModelProcess) -> None:
        self.gpu = gpu  # this process'
        self.model = model
        self._given_up: list[Slot] = []

    def __enter__(self) -> Client:
        return self

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

    @contextlib.contextmanager
    def slot(self, model: str, count: int, **more: Any) -> Iterator[DeviceSlot]:
        """Make a slot as :meth:`DeviceSlot.of_numbers` does."""
        with self._kept(model, DeviceSlot.of_numbers(self.gpu, model, count, **more)) as made:
            yield made

    @contextlib.contextmanager
    def lent_slot(self, model: str, tensor: DeviceArray) -> Iterator[LentSlot]:
        """Make a slot whose input is somebody's own tensor."""
        with self._kept(model, LentSlot(self.gpu, model, tensor)) as made:
            yield made

    @contextlib.contextmanager
    def batch_slot(self, model: str, rows: int, width: int) -> Iterator[DeviceSlot]:
        """Make a slot for rows of FP32, and as many in the output."""
        shapes, kinds = ((rows, width), (rows, width)), (np.dtype(np.float32), np.dtype(np.float32))
        with self._kept(model, DeviceSlot(self.gpu, model, *shapes, ("INPUT0", "OUTPUT0"), kinds, 0)) as made:
            yield made

    @contextlib.contextmanager
    def image_slot(self, count: int, height: int, width: int) -> Iterator[DeviceSlot]:
        """Make a slot for photographs."""
        shapes = (count, height, width, 3), (count, 3, height, width)
        kinds = np.dtype(np.uint8), np.dtype(np.float32)
        made = DeviceSlot(self.gpu, "gpu_normalize", *shapes, ("IMAGES", "NORMALIZED"), kinds, 0)
        with self._kept("gpu_normalize", made):
            yield made

    @contextlib.contextmanager
    def host_slot(self, model: str, values: npt.NDArray[np.generic]) -> Iterator[HostSlot]:
        """Make a slot with an input on the host."""
        with self._kept(model, HostSlot(model, values)) as made:
            yield made

    def infer(self, model: str, *slots: Slot) -> dict[str, Any]:
        """Make a request in each slot, for one ``execute``; they must succeed. Return the model's notes."""
        answer = self.model.infer(model, *[slot.next_request() for slot in slots])
        require(not answer.error, f"the model refused the request: {answer.error}")
        for slot in slots:
            require(slot.is_completed, "the model has answered without finishing with the slot")
        return answer.notes

    def check_output(self, slot: DeviceSlot, expected: npt.ArrayLike, otherwise: str) -> None:
        """Raise CheckFailedError unless this is in a slot's output by now."""
        require(bool((self.gpu.download(slot.y) == expected).all()), otherwise)

    def refusal(self, model: str, slot: Slot, encoded: bytes | None = None) -> str:
        """Make a request, with another table if one is given, which must be refused, and return why."""
        answer = self.model.infer(model, slot.next_request(encoded))
        require(bool(answer.error), "the model has served it")
        return answer.error

    def let_go(self, model: str) -> None:
        """Make a request with memory of the host alone: a model that gets new memory lets go of what was given up."""
        slot = Slot()
        try:
            slot.describe(model, {}, {})
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
        while any(slot.is_mapped_elsewhere for slot in slots):
            if time.monotonic() > deadline:
                raise CheckFailedError(f"the model has not let go of memory that was given up {_LET_GO_S:g} s ago")
            time.sleep(_PAUSE_S)

    @contextlib.contextmanager
    def _kept(self, model: str, slot: _AnySlot) -> Iterator[_AnySlot]:
        self._given_up.append(slot)
        try:
            yield slot
            slot.unlink()
            self.let_go(model)
        except BaseException:
            self.model.kill()
            self.gpu.destroy_stream()  # it may wait for what the model will never do
            slot.unlink()
            raise


Check = Callable[[Client], str]
"""Returns a detail for the report; raises what the report understands."""
