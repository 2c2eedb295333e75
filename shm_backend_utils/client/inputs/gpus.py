"""What calls have GPUs do for them: on streams of the client's own, behind what the user has there."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ...memory.cuda.bank import DeviceBank
from ...memory.cuda.ordering import Mark, OwnStreams, order_after
from ...memory.cuda.runtime import CudaRuntime
from ...memory.cuda.streams import Named

__all__ = ["GpuWork", "Gpus"]


class Gpus:
    """GPUs as one client's calls use them. CUDA is loaded when a call needs it first."""

    def __init__(self, bank: DeviceBank, lend_bytes: int) -> None:
        self.bank = bank
        self.lend_bytes = lend_bytes  # an input of as many, or more, is used where it is
        self._lock = threading.Lock()
        self._streams: OwnStreams | None = None

    @property
    def runtime(self) -> CudaRuntime:
        """CUDA; raises MachineError where it, or a GPU, is missing."""
        return self.bank.cuda.runtime

    @property
    def streams(self) -> OwnStreams:
        """The client's streams; raises as :attr:`runtime`."""
        with self._lock:
            if self._streams is None:
                self._streams = OwnStreams(self.runtime)
            return self._streams

    def close(self) -> None:
        """Let go of the streams that no call uses. Those of calls under way go with these."""
        with self._lock:
            self._streams = None


class GpuWork:
    """What one call has GPUs do: all on one stream for each of them. Give the streams back by :meth:`close`."""

    _lender: OwnStreams | None = None

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._streams: dict[int, int] = {}

    def stream_on(self, device: int) -> int:
        """Return the call's stream of a GPU."""
        stream = self._streams.get(device)
        if stream is None:
            if self._lender is None:
                self._lender = self._gpus.streams
            stream = self._streams[device] = self._lender.borrow(device)
        return stream

    def follow(self, named: Named, devices: Iterable[int]) -> None:
        """Have what comes later here wait for what the user has named; if that is nothing, for all of these GPUs."""
        for device in {*devices, *self._streams}:
            order_after(self._gpus.runtime, named, device, self.stream_on(device))

    def may_block(self, named: Named) -> bool:
        """Return whether :meth:`follow` waits for GPUs, as the driver cannot let a stream do so."""
        return not named and not self._gpus.runtime.records_devices

    def marks(self) -> list[Mark]:
        """Return marks of what the GPUs have to do for the call until here; to be closed."""
        marks: list[Mark] = []
        try:
            for device, stream in self._streams.items():
                marks.append(Mark(self._gpus.runtime, stream, device))
        except BaseException:
            for mark in marks:
                mark.close()
            raise
        return marks

    def close(self) -> None:
        """Give the streams back; what is still to be done there is done first. Twice is fine."""
        lender = self._lender
        if lender is not None:
            streams, self._streams = self._streams, {}
            self._lender = None
            for device, stream in streams.items():
                lender.give_back(stream, device)

    def __del__(self) -> None:
        self.close()
