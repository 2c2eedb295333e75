"""The client's process: device memory for a call, and the pipe to the model's process."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

import gpu_check_model
import numpy as np
from gpu_check_gpu import Gpu, LoadGpu
from gpu_check_model import Answer
from gpu_check_report import CheckFailedError, require

from shm_backend_utils import descriptor, dtypes
from shm_backend_utils.descriptor import CudaRegionClaim, Descriptor, InputSpan, OutputSpan, SystemRegionClaim
from shm_backend_utils.region import lease
from shm_backend_utils.region.cuda import CudaAllocation
from shm_backend_utils.region.cuda_runtime import device_guard
from shm_backend_utils.region.managed import ManagedRegion

__all__ = ["Client", "DeviceSlot", "ModelProcess"]

_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_LET_GO_S: Final = 20.0
_PAUSE_S: Final = 0.01
_ALIGNMENT: Final = 256


class ModelProcess:
    """A process that is started when it is needed, and anew when it has died. A context manager."""

    def __init__(self, load_gpu: LoadGpu) -> None:
        self._load_gpu = load_gpu
        self._running: tuple[Any, Any] | None = None

    def infer(self, model: str, parameters: str) -> Answer:
        """Send a request and return the answer; raises CheckFailedError if none comes."""
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

    def counts(self) -> dict[str, int]:
        """Return how often the process has opened and closed memory of others."""
        return self.infer("", "").notes

    def kill(self) -> None:
        """End it at once."""
        if self._running is not None:
            self._running[0].kill()
            self._end()

    def __enter__(self) -> ModelProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running[1].close()
            self._running[0].join(_ANSWER_S)
            self.kill()

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")  # a forked child can use no CUDA
        ours, theirs = context.Pipe()
        process = context.Process(target=gpu_check_model.serve, args=(theirs, self._load_gpu), daemon=True)
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


class DeviceSlot:
    """Device memory for one input and one output of one call at a time, fenced by a slot of a managed region.

    Attributes
    ----------
    x, y : array
        Input and output.
    allocation : CudaAllocation
    region : ManagedRegion
    """

    def __init__(
        self,
        gpu: Gpu,
        model: str,
        shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        names: tuple[str, str],
        dtype: type[np.generic],
        device: int,
    ) -> None:
        given = np.dtype(dtype)
        x_bytes, y_bytes = math.prod(shape) * given.itemsize, math.prod(out_shape) * 4
        y_begin = -(-x_bytes // _ALIGNMENT) * _ALIGNMENT
        self._gpu = gpu
        self.allocation = CudaAllocation(gpu.runtime, y_begin + max(y_bytes, _ALIGNMENT), device)
        self.region = ManagedRegion.create(0)
        self.x = self.allocation.array_at(0, given, shape, x_bytes)
        self.y = self.allocation.array_at(y_begin, np.dtype(np.float32), out_shape, y_bytes)
        self._record = self.region.record(0)
        self._generation = 0
        header = self.region.header
        claims = (
            SystemRegionClaim(self.region.segment.key, header.byte_size, header.token.hex(), 0),
            CudaRegionClaim(self.allocation.handle, self.allocation.byte_size, self.allocation.device_uuid, 0),
        )
        self.text = descriptor.encode(
            Descriptor(
                model,
                claims,
                {names[0]: InputSpan(1, 0, x_bytes, dtypes.from_numpy(given, names[0]), shape)},
                {names[1]: OutputSpan(1, y_begin, y_bytes)},
            )
        )
        self._parameters = _parameters(self.text)

    def claiming(self, **changes: object) -> str:
        """Return the descriptor with other claims about the device memory."""
        content = json.loads(self.text)
        content["regions"][1].update(changes)
        return json.dumps(content)

    def next_request(self, text: str | None = None) -> str:
        """Begin a generation and return the parameters of its request, with another descriptor if one is given."""
        self._generation += 1
        self._record.generation = self._generation
        begin = self._parameters if text is None else _parameters(text)
        return f"{begin}{self._generation}}}"

    @property
    def is_completed(self) -> bool:
        """Whether the model has finished with the last request."""
        return self._record.completed == self._generation

    def results(self) -> dict[str, Any]:
        """Return what the model has written of its outputs."""
        results: dict[str, Any] = json.loads(self._record.results())
        return results

    def unlink(self) -> None:
        """Give the memory up: models let go of it now."""
        self.region.segment.unlink()

    @property
    def is_mapped_elsewhere(self) -> bool:
        """Whether some model has the device memory mapped."""
        return lease.has_users(self.region.segment.fileno())

    def free(self) -> None:
        """Free everything; nobody may have the device memory mapped."""
        self.x = self.y = None
        self.allocation.free()
        del self._record
        self.region.close()


class Client:
    """Calls of the check.

    Attributes
    ----------
    gpu : Gpu
        This process'.
    model : ModelProcess
    """

    def __init__(self, gpu: Gpu, model: ModelProcess) -> None:
        self.gpu = gpu
        self.model = model

    @contextlib.contextmanager
    def slot(self, model: str, count: int, *, room: int | None = None, device: int = 0) -> Iterator[DeviceSlot]:
        """Make a slot for ``count`` numbers (FP32), and room for as many in the output unless told otherwise."""
        out = (count if room is None else room,)
        with self._kept(
            model, DeviceSlot(self.gpu, model, (count,), out, ("INPUT0", "OUTPUT0"), np.float32, device)
        ) as slot:
            yield slot

    @contextlib.contextmanager
    def image_slot(self, count: int, height: int, width: int) -> Iterator[DeviceSlot]:
        """Make a slot for photographs."""
        shapes = (count, height, width, 3), (count, 3, height, width)
        made = DeviceSlot(self.gpu, "gpu_normalize", *shapes, ("IMAGES", "NORMALIZED"), np.uint8, 0)
        with self._kept("gpu_normalize", made) as slot:
            yield slot

    def infer(self, model: str, slot: DeviceSlot) -> dict[str, Any]:
        """Make a request, which must succeed, and return the model's notes."""
        answer = self.model.infer(model, slot.next_request())
        require(not answer.error, f"the model refused the request: {answer.error}")
        require(slot.is_completed, "the model has answered without finishing with the slot")
        return answer.notes

    def refusal(self, model: str, slot: DeviceSlot, text: str) -> str:
        """Make a request with another descriptor, which must be refused, and return why."""
        answer = self.model.infer(model, slot.next_request(text))
        require(bool(answer.error), "the model has served it")
        return answer.error

    def let_go(self, model: str) -> None:
        """Make a request with memory of the host alone: a model that gets new memory lets go of what was given up."""
        region = ManagedRegion.create(_ALIGNMENT)
        try:
            header = region.header
            claim = SystemRegionClaim(region.segment.key, header.byte_size, header.token.hex(), 0)
            region.record(0).generation = 1
            self.model.infer(model, f"{_parameters(descriptor.encode(Descriptor(model, (claim,), {}, {})))}1}}")
        finally:
            region.segment.unlink()
            region.close()

    def wait_until_unmapped(self, model: str, slots: list[DeviceSlot]) -> None:
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
    def _kept(self, model: str, slot: DeviceSlot) -> Iterator[DeviceSlot]:
        try:
            with device_guard(self.gpu.runtime, slot.allocation.device):
                yield slot
            self.wait_until_unmapped(model, [slot])
        except BaseException:
            self.model.kill()  # whoever has the memory mapped must be gone before it is freed
            slot.unlink()
            raise
        finally:
            slot.free()


def _parameters(text: str) -> str:
    """Return the request's parameters up to the generation."""
    return f'{{"{descriptor.PARAMETER}":{json.dumps(text)},"{descriptor.GENERATION_PARAMETER}":'
