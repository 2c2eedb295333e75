"""What one call has to do with GPUs: which it uses, and which streams it has named there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ...errors import ModelError
from ...memory.cuda.ordering import OwnStreams
from ...memory.cuda.streams import NamedStream

if TYPE_CHECKING:
    from .arrays import DeviceArrays

__all__ = ["DeviceUses", "shared_by"]


class DeviceUses:
    """The GPUs that a call, or a batch of calls, uses. Iterating yields their numbers."""

    def __init__(self, arrays: DeviceArrays) -> None:
        self.streams: dict[int, list[NamedStream]] = {}  # named there, by GPU; none if all of it is meant
        self.own: list[NamedStream] = []  # ours, the call's until it ends, when they are waited for
        self.reads_host = False  # whether a copy from memory of the host may be under way
        self._arrays = arrays
        self._lender: OwnStreams | None = None
        self._kept: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.streams))

    def __contains__(self, device: object) -> bool:
        return device in self.streams

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def are_named(self) -> bool:
        """Whether on each of its GPUs a stream was named."""
        return all(self.streams.values())

    def add(self, device: int) -> None:
        """Take note that the call uses a GPU."""
        self.streams.setdefault(device, [])

    def name(self, value: Any) -> None:
        """Take note that the call's work is on a stream, on the GPU that the stream is of.

        A default stream is that of the call's GPU, if it uses one alone, and else of the instance's. ModelError if it
        is no stream, or one of a GPU that neither the call uses nor the instance is on; or if it is being captured into
        a graph.
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
                f"{instance}; name streams of these, and of another one when the call has a tensor there"
            )
        known = self.streams.setdefault(device, [])
        if stream not in known:
            known.append(stream)

    def join(self, other: DeviceUses) -> None:
        """Take over what another call of the same batch has noted; from then on both use this object."""
        for device, streams in other.streams.items():
            known = self.streams.setdefault(device, [])
            known += [stream for stream in streams if stream not in known]
        self.own += other.own
        self.reads_host |= other.reads_host
        self.keep(other._kept)

    def keep(self, arrays: Iterable[Any]) -> None:
        """Keep arrays that a GPU has still to copy."""
        self._kept += arrays

    @property
    def lender(self) -> OwnStreams:
        """Whose streams those are: the same for the whole call, also if its session is closed meanwhile."""
        if self._lender is None:
            self._lender = self._arrays.own_streams
        return self._lender

    def own_stream(self, device: int) -> int:
        """Return a stream of ours, which is the call's until it ends."""
        for stream in self.own:
            if stream.device == device:
                return stream.handle
        handle = self.lender.borrow(device)
        self.own.append(NamedStream(handle, device))
        return handle

    def wait(self) -> None:
        """Wait as :meth:`DeviceArrays.wait` does."""
        self._arrays.wait([self])

    def release(self) -> None:
        """Let go of streams and arrays, as the GPUs have done what they had to do. Twice is fine."""
        self._kept = []
        own, self.own = self.own, []
        for stream in own:
            assert stream.device is not None
            self.lender.give_back(stream.handle, stream.device)
        self._lender = None

    def leave(self) -> None:
        """Let go of them, while GPUs are still at work: arrays stay until that is done."""
        kept, self._kept = self._kept, []
        if kept:
            for device in self:
                self._arrays.runtime.retired.add(device, kept.copy().clear)
        self.release()


def shared_by(every: Iterable[DeviceUses | None]) -> DeviceUses | None:
    """Return one object for all calls of a batch, which has what each of them has noted so far; None if none has."""
    found: DeviceUses | None = None
    for each in every:
        if found is None:
            found = each
        elif each is not None and each is not found:
            found.join(each)
    return found
