"""The results of a request: the model's description of its outputs, in the slot's record. Pure: bytes in, bytes out.

::

    0  started       u64   the last generation that a model began to execute
    8  completed     u64   the last generation that it finished, successfully or not; written last, with events by a GPU
   16  length        u32   from the beginning of this half of the record; 0 if the model failed
   20  output_count  u16
   22  event_count   u16
   24  outputs: tensors, as in a table; flags 1 for one that found no room and is in the response
       events: a u16 each, the number of a further region where a GPU still works until ``completed`` is written; then
       zeros up to a multiple of 8

Strings that found no room are in the response as bytes, in the same form as in memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..dtypes import DType
from ..errors import PeerError, TensorError
from ..model_spec import ModelSpec
from .claims import MAX_REGIONS, padded
from .spans import MAX_TENSORS, brief
from .table import BY_NUMBER, MAX_RANK, SHAPES, TENSOR, TensorForm, check_element_count, check_shape

__all__ = [
    "NO_RESULTS",
    "OutputPlace",
    "Results",
    "assemble",
    "broken_results",
    "check_output",
    "decode",
    "encode",
    "missing_output",
    "read_expected",
    "unused_memory",
    "with_events",
]

_STAMPS: Final = struct.Struct("<QQ")
_HEAD: Final = struct.Struct("<IHH")
_STAMPS_AND_HEAD: Final = struct.Struct("<QQIHH")
_IN_RESPONSE: Final = 1
_BEGIN: Final = _STAMPS.size + _HEAD.size
NO_RESULTS: Final = bytes(_HEAD.size)
"""The results of a call that failed."""


class OutputPlace(NamedTuple):
    """Where the model has left an output."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    region: int  # 0 is the slot's own, 1 the first of the table's further regions
    offset: int
    byte_size: int
    is_in_response: bool  # the output found no room, and came back through Triton: offset and size are 0


class Results(NamedTuple):
    """A model's description of a request's outputs, checked."""

    outputs: tuple[OutputPlace, ...]  # empty if the model failed
    # Numbers, from 1, of further regions where a GPU is still at work until `completed` is the request's generation.
    events: tuple[int, ...]
    completed: int = 0  # the generation of these results, which the model finished last


def encode(outputs: Iterable[OutputPlace], events: Sequence[int] = ()) -> bytes:
    """Return results in their binary form, without the stamps in front."""
    encoded = []
    for name, dtype, shape, region, offset, byte_size, is_in_response in outputs:
        form = TensorForm.of(name, dtype, len(shape))
        encoded.append(form.encode(shape, region, offset, byte_size, is_in_response=is_in_response))
    return with_events(assemble(encoded), events)


def assemble(outputs: Sequence[bytes]) -> bytes:
    """Return results in their binary form, as :func:`encode` does, from outputs in their binary form."""
    body = b"".join(outputs)
    return _HEAD.pack(_BEGIN + len(body), len(outputs), 0) + body


def with_events(results: bytes, events: Sequence[int]) -> bytes:
    """Add events to results in their binary form that have no events yet."""
    length, output_count, _ = _HEAD.unpack_from(results)
    more = padded(struct.pack(f"<{len(events)}H", *events))
    return _HEAD.pack(length + len(more), output_count, len(events)) + results[_HEAD.size :] + more


def decode(  # noqa: PLR0912, PLR0915  # one function: after the wait for an answer, CPU caches are cold
    data: bytes, byte_sizes: Sequence[int], begin: int = 0, spec: ModelSpec | None = None, generation: int = 0
) -> Results:
    """Check results in the model's half of a slot's record, copied as a whole; PeerError if they break the protocol.

    ``byte_sizes`` has the sizes of the request's regions, the slot's own first; the request's memory in that region
    begins at ``begin``. With a ``spec``, the results must be of its outputs, and of ``generation``: completed, or with
    events only started.
    """
    try:
        started, completed, length, output_count, event_count = _STAMPS_AND_HEAD.unpack_from(data)
        if spec is not None and completed != generation and not (event_count and started == generation):
            raise unused_memory(spec.name)
        if length == 0:
            return Results((), (), completed)
        if length > len(data):
            raise ValueError(f"{length} bytes where there is room for {len(data)}")
        if output_count > MAX_TENSORS or event_count > MAX_REGIONS:
            raise ValueError(f"{output_count} outputs and {event_count} events")
        at = _BEGIN
        outputs: dict[str, OutputPlace] = {}
        for _ in range(output_count):
            offset, byte_size, region, number, rank, name_length, flags = TENSOR.unpack_from(data, at)
            at += TENSOR.size
            if rank > MAX_RANK:
                raise ValueError(f"an output of {rank} dimensions")
            shape = SHAPES[rank].unpack_from(data, at)
            at += 8 * rank
            name = data[at : at + name_length].decode()
            at += name_length + -name_length % 8
            dtype = BY_NUMBER.get(number)
            if dtype is None:
                raise ValueError(f"data type {number}")
            if flags == _IN_RESPONSE:
                check_shape("an output", dtype, shape)
            else:
                is_before = offset < begin and not region and byte_size
                if flags or is_before or region >= len(byte_sizes) or offset + byte_size > byte_sizes[region]:
                    raise ValueError(f"{byte_size} bytes at offset {offset} that are not the request's")
                if not byte_size or math.prod(shape) * dtype.itemsize != byte_size:
                    check_element_count("an output", dtype, shape, byte_size)
                if dtype.itemsize and offset % dtype.itemsize:
                    raise ValueError(f"an output of {dtype.name} at offset {offset}")
            if spec is not None:
                check_output(spec, name, dtype, shape)
            outputs[name] = OutputPlace(name, dtype, shape, region, offset, byte_size, flags == _IN_RESPONSE)
        events: tuple[int, ...] = ()
        if event_count:
            events = _events(data, at, event_count, len(byte_sizes))
            at += (2 * event_count + 7) // 8 * 8
        if at != length:
            raise ValueError(f"{at} bytes where their length says {length}")
        if "" in outputs or len(outputs) != output_count:
            raise ValueError("an output without a name, or the same output twice")
    except UnicodeDecodeError:
        raise broken_results("a name that is not UTF-8") from None
    except struct.error:
        raise broken_results("they end too early") from None
    except ValueError as error:
        raise broken_results(error) from None
    return Results(tuple(outputs.values()), events, completed)


def read_expected(
    data: bytes, generation: int, begin: int, end: int, wanted: Collection[str], forms: Mapping[str, TensorForm]
) -> dict[str, tuple[DType, tuple[int, ...], int]] | None:
    """Return type, shape and offset of each wanted output; None unless the results are of exactly these, in this order.

    The outputs must lie between ``begin`` and ``end``, without events. :func:`decode` reads all other results, too.
    """
    _, completed, length, output_count, event_count = _STAMPS_AND_HEAD.unpack_from(data)
    if completed != generation or output_count != len(wanted) or event_count or length > len(data):
        return None
    at, reach, found = _BEGIN, begin, {}
    for name in wanted:
        form = forms.get(name)
        if form is None or at + form.byte_size > length:
            return None
        dtype, rank, fixed_end, known, text, _, step, unpack_from = form
        offset, byte_size, kind, *sizes, called = unpack_from(data, at)
        if kind != known or called != text or not reach <= offset <= end - byte_size or offset % dtype.itemsize:
            return None
        shape = tuple(sizes)
        if not byte_size or math.prod(shape) * dtype.itemsize != byte_size:
            return None
        for size, want in zip(shape[rank - len(fixed_end) :], fixed_end, strict=True):
            if want not in (size, -1):
                return None
        found[name] = dtype, shape, offset
        reach = offset + byte_size
        at += step
    return found if at == length else None


def _events(data: bytes, begin: int, count: int, region_count: int) -> tuple[int, ...]:
    """Return the numbers of regions with events; ValueError for a wrong number, struct.error if the data is cut."""
    events: tuple[int, ...] = struct.unpack_from(f"<{count}H", data, begin)
    if min(events) < 1 or max(events) >= region_count or len(set(events)) != count:
        raise ValueError(f"events of regions {brief(str(events))}, but the request has {region_count - 1}")
    return events


def broken_results(found: object) -> PeerError:
    """Return the error for results that break the protocol."""
    return PeerError(f"the model's results break the protocol: {found}; install the same release for client and model")


def unused_memory(model: str) -> PeerError:
    """Return the error for a model that answered without writing these results."""
    return PeerError(
        f"model {model!r} answered without having used the shared memory, although its config.pbtxt declares the "
        "direct path; check that its model.py uses ShmSession, of the same release as the client"
    )


def check_output(spec: ModelSpec, name: str, dtype: DType | None, shape: tuple[int, ...]) -> DType:
    """Return the type of an output that a peer describes; PeerError unless it fits the model's configuration."""
    expected = spec.outputs.get(name)
    if expected is None or dtype is None:
        found = "of a type that Triton does not have" if dtype is None else "which its configuration does not have"
        raise PeerError(f"model {spec.name!r} answered with an output {name!r} {found}")
    rank, end = len(expected.shape), expected.fixed_end
    fits = dtype is expected.dtype and len(shape) == rank and (not end or shape[-len(end) :] == end)
    if fits and min(shape, default=0) >= 0:
        return dtype  # the usual case, checked fast
    try:
        if expected.dtype is None:
            expected.check_shape(shape)
        else:
            expected.check(dtype, shape)
    except TensorError:
        raise PeerError(
            f"output {name!r} of model {spec.name!r} came as {dtype.name} {list(shape)}, but its configuration says "
            f"{expected.config_dtype} {list(expected.shape)}; correct its config.pbtxt or its model.py; if it was just "
            "reloaded, call it again"
        ) from None
    return dtype


def missing_output(model: str, name: str) -> PeerError:
    """Return the error for an answer without one of the wanted outputs."""
    return PeerError(f"model {model!r} answered without output {name!r}")
