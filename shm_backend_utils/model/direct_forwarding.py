"""A request to another model on shared memory: the client's own, lent for the time, and scratch of this model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..dtypes import BYTES
from ..errors import BatchSizeError, ClosedError, PeerError
from ..memory.managed import array_at
from ..model_spec import BATCH_CARRIER, ModelSpec
from ..protocol import descriptor
from ..protocol.descriptor import GENERATION_PARAMETER, PARAMETER, Descriptor, InputSpan, OutputSpan
from ..protocol.results import OutputPlace, parse_results, unused_memory
from ..tensors.strings import Strings
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .device_arrays import DeviceArrays
from .forwarding import Forwarding, Given, Outputs
from .lending import Lending, Place
from .memory import HostMemory
from .places import DIRECT
from .scratch import Scratch
from .triton import TritonBackend

__all__ = ["DirectForwarding"]

Span = TypeVar("Span", InputSpan, OutputSpan)

_OWN: Final = 0
_ALIGNMENT: Final = 256
_BYTE: Final = np.dtype(np.uint8)


class DirectForwarding(Forwarding):
    """For models that map the memory which a request names.

    Parameters
    ----------
    spec : ModelSpec
        The other model's.
    room : callable
        Takes an output's name; returns the bytes to keep for it, as far as that is known.
    lending : Lending
        Memory that need not be copied.
    """

    def __init__(
        self,
        spec: ModelSpec,
        version: str,
        backend: TritonBackend,
        arrays: DeviceArrays,
        given: Mapping[str, Given],
        outputs: Outputs,
        names: Sequence[str],
        parameters: Mapping[str, Any],
        room: Callable[[str, int | None], int],
        lending: Lending,
        scratch: Scratch,
    ) -> None:
        super().__init__(spec.name, backend, arrays, outputs)
        self._lending = lending
        self._cursor = 0
        batch_size = _batch_size(spec, given)
        in_scratch: dict[str, Given] = {}
        inputs, spans = {}, {}
        for name, each in given.items():
            spec.input(name).check(each.dtype, each.shape)
            place = lending.place_of(each.array)
            if place is None:
                in_scratch[name] = each
                place = self._keep(each.array.nbytes)
            inputs[name] = InputSpan(place.region, place.offset, each.array.nbytes, each.dtype, each.shape)
        for name in names:
            target = self._targets.get(name)
            place = None if target is None or not target.writable else lending.place_of(target.array)
            byte_size = room(name, batch_size) if place is None or target is None else target.attributes.byte_size
            spans[name] = OutputSpan(*(place or self._keep(byte_size)), byte_size)
        self._slot, memory = scratch.take(self._cursor)
        begin = self._slot.region.data_offset
        lending.set_own(self._slot.claim, HostMemory(memory))
        for name, each in in_scratch.items():
            _write(memory, begin + inputs[name].offset, each)
        text = descriptor.encode(
            Descriptor(
                spec.name,
                tuple(lending.claims),
                {name: _moved(span, begin) for name, span in inputs.items()},
                {name: _moved(span, begin) for name, span in spans.items()},
            )
        )
        carriers = []
        if batch_size is not None:
            carriers.append(backend.output(BATCH_CARRIER, np.empty((batch_size, 0), np.uint8)))
        named = {PARAMETER: text, GENERATION_PARAMETER: self._slot.advance()}
        self.request = backend.request(spec.name, version, carriers, names, {**parameters, **named})

    def result(self, response: Any) -> dict[str, TensorView]:
        tensors = self._tensors_of(response)
        if not self._slot.is_completed:
            raise unused_memory(self.model)
        memories = self._lending.memories
        sizes = [memory.attributes().byte_size for memory in memories]
        places = parse_results(self._slot.region.record(0).results(), sizes)
        return {place.name: self._output(place, tensors) for place in places}

    def give_up(self) -> None:
        with contextlib.suppress(ClosedError):  # then its memory has no name any more, and is refused as well
            self._slot.advance()

    def _output(self, place: OutputPlace, tensors: Mapping[str, TensorView]) -> TensorView:
        name, dtype, shape, region, offset, byte_size = place
        if byte_size is None:
            view = tensors.get(name)
            if view is None:
                raise PeerError(f"model {self.model!r} answered without output {name!r}")
            self.overflowed[name] = view.attributes.byte_size
            if dtype is BYTES:
                view = StringsView(name, Strings.encoded_as(name, view.numpy(), shape), view.path)
            return self._delivered(name, view)
        assert dtype is not None
        found = self._lending.memories[region].view(name, DIRECT, offset, byte_size, dtype, shape, writable=False)
        if found is None:
            raise PeerError(f"model {self.model!r} says that output {name!r} lies where it cannot lie")
        target = self._targets.get(name)
        if target is not None and self._lending.place_of(target.array) == (region, offset):
            self._check_fits(name, target, found)
            return target
        return self._delivered(name, found)

    def _keep(self, byte_size: int) -> Place:
        offset, self._cursor = self._cursor, -(-(self._cursor + byte_size) // _ALIGNMENT) * _ALIGNMENT
        return Place(_OWN, offset)


def _moved(span: Span, begin: int) -> Span:
    """Return a span from the beginning of its region; in the scratch slot it was laid out from that of the data."""
    return replace(span, offset=begin + span.offset) if span.region == _OWN else span


def _write(memory: npt.NDArray[np.uint8], offset: int, given: Given) -> None:
    dtype, shape = (_BYTE, (given.array.nbytes,)) if given.dtype is BYTES else (given.dtype.numpy, given.shape)
    target = array_at(memory, offset, dtype, shape, given.array.nbytes)
    assert target is not None
    np.copyto(target, given.bytes_on_host())


def _batch_size(spec: ModelSpec, given: Mapping[str, Given]) -> int | None:
    if spec.max_batch_size == 0:
        return None
    sizes = {name: each.shape[0] if each.shape else 0 for name, each in given.items()}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no input"
        raise BatchSizeError("", f"inputs of model {spec.name!r} must have one batch size; found {found}")
    (name, size), *_ = sizes.items()
    spec.check_batch_size(name, size)
    return size
