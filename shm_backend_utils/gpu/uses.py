"""The GPUs, streams and memory that a call of a session uses, from its first array to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..memory.managed import ManagedRegion
from .ordering import OwnStreams, do_after_all_work
from .scratch import Block, Dropped
from .streams import NamedStream

if TYPE_CHECKING:
    from .instance import InstanceGpus

__all__ = ["DeviceUses"]


class DeviceUses:
    """The GPUs that a call or a batch uses. Iteration yields their numbers."""

    def __init__(self, arrays: InstanceGpus) -> None:
        self.streams: dict[int, list[NamedStream]] = {}  # the named streams, by GPU; an empty list means the whole GPU
        self.own: list[tuple[OwnStreams, NamedStream]] = []  # the library's streams; the call's end waits for them
        self.reads_host = False  # whether a copy from host memory may be in progress
        self._arrays = arrays
        self._kept: list[Any] = []
        self._dropped: list[Dropped] = []  # of this call, and of the calls that it has joined

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.streams))

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def are_named(self) -> bool:
        """Whether the call has named a stream on each GPU that it uses."""
        return all(self.streams.values())

    def add(self, device: int) -> None:
        """Record that the call uses a GPU."""
        self.streams.setdefault(device, [])

    def name(self, value: Any) -> None:
        """Record a stream with work of the call; ModelError if it is of another GPU, or cannot be waited for.

        A default stream belongs to the call's GPU if the call uses exactly one, else to the instance's GPU.
        """
        instance = self._arrays.device
        meant = next(iter(self.streams)) if len(self.streams) == 1 else instance
        stream = self._arrays.stream_of(value, meant)
        device = stream.device
        assert device is not None
        if device not in self.streams and device != instance:
            used = ", ".join(map(str, self)) or "none"
            raise ModelError(
                f"a stream of GPU {device} was named, but this call uses GPU {used}, and its instance is on GPU "
                f"{instance}; name a stream of one of these, or get a tensor on GPU {device} first"
            )
        known = self.streams.setdefault(device, [])
        if stream not in known:
            known.append(stream)

    def join(self, other: DeviceUses) -> None:
        """Add the records of another call of the same batch; afterwards both calls use this object."""
        for device, streams in other.streams.items():
            known = self.streams.setdefault(device, [])
            known += [stream for stream in streams if stream not in known]
        self.own += other.own
        self.reads_host |= other.reads_host
        self.keep(other._kept)
        self._dropped += other._dropped

    def keep(self, arrays: Iterable[Any]) -> None:
        """Keep arrays alive that a GPU has not copied yet."""
        self._kept += arrays

    def own_stream(self, device: int) -> tuple[OwnStreams, int]:
        """Return a stream for the call, after its pool: the stream goes back there even if the session was closed."""
        for streams, stream in self.own:
            if stream.device == device:
                return streams, stream.handle
        streams = self._arrays.own_streams
        handle = streams.borrow(device)
        self.own.append((streams, NamedStream(handle, device)))
        return streams, handle

    @property
    def dropped(self) -> Dropped:
        """Takes the own memory of the call's arrays."""
        if not self._dropped:
            self._dropped.append(self._arrays.new_dropped())
        return self._dropped[0]

    def take_dropped(self) -> list[Block]:
        """Return the own memory of arrays that were dropped so far."""
        return [block for each in self._dropped for block in each.take()]

    def wait(self) -> None:
        """Wait as :meth:`InstanceGpus.wait` does."""
        self._arrays.wait([self])

    def wait_after_error(self) -> None:
        """Wait as :meth:`wait` does, but end no graph capture: the call may have failed before it named a stream."""
        for device, streams in self.streams.items():
            if streams:
                self._arrays.wait_on(device, [self])
            else:
                self._arrays.runtime.wait_beside_captures(device)

    def release(self) -> None:
        """Release streams and arrays after the GPUs have finished. Twice is fine."""
        self._kept = []
        for each in self._dropped:
            each.end()
        own, self.own = self.own, []
        for streams, stream in own:
            assert stream.device is not None
            streams.give_back(stream.handle, stream.device)

    def leave_to_gpu(self, region: ManagedRegion, slot: int, generation: int, work: Callable[[], None]) -> bool:
        """Let a GPU write a slot's ``completed`` behind the call's work; return False if none can.

        When it is written, or never will be, streams and arrays are released, and then ``work`` is done.
        """
        is_over = self._arrays.complete(self, region, slot, generation)
        if is_over is None:
            return False
        dropped = self.take_dropped()
        for each in self._dropped:
            each.end()

        def rest() -> None:
            self._arrays.put_back(dropped)
            kept, self._kept = self._kept, []
            self._arrays.runtime.retired.add(kept.clear)  # not here: finalizers of model.py's arrays may wait
            self.release()
            work()

        self._arrays.runtime.retired.add_when(is_over, rest)
        return True

    def leave(self) -> None:
        """Release streams and arrays while GPUs still work; the arrays stay alive until all work there is done."""
        kept, self._kept = self._kept, []
        do_after_all_work(self._arrays.runtime, list(self), kept.clear)
        self.release()
