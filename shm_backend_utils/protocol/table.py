"""The table of a request: the client's description of its tensors, in the slot's record. Pure: bytes in, bytes out.

::

    0  generation     u64   the slot's use count; written last
    8  length         u32   of the whole table, generation included
   12  input_count    u16
   14  output_count   u16
   16  region_count   u16   further regions, see :mod:`.claims`
   18  frame_count    u16   of a stream's ring, see :class:`.spans.Ring`; 0 for none
   20  frame_slot     u16
   22  probe          u16   0; 1 and 2 are for :mod:`.probe`
   24  frame_stride   u64
   32  regions, then inputs, then outputs

A tensor:

    0  offset         u64
    8  byte_size      u64   of an input; the room for an output
   16  region         u16   0 is the slot's own region, 1 the first of the further ones
   18  datatype       u8    the number of TRITONSERVER_DataType (tritonserver.h); 0 in an output
   19  rank           u8    0 in an output
   20  name_length    u16
   22  flags          u16   0; results use it
   24  shape          rank times u64
       name           UTF-8, then zeros up to a multiple of 8

The model copies the record once and decodes the copy, so that it reads nothing in shared memory twice. Tables from
:func:`decode` need no second check, except of the sizes of further regions, which only the opened memory shows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .. import dtypes
from ..dtypes import BYTES, LENGTH_SIZE, DType
from ..errors import TableError
from ..model_spec import TensorSpec
from .claims import RegionClaim, claimed_size, decode_claims, encode_claim
from .layout import MAX_SLOT_COUNT
from .spans import (
    MAX_FRAMED_GENERATION,
    MAX_FRAMES,
    MAX_TENSORS,
    InputSpan,
    OutputSpan,
    Ring,
    Table,
    brief,
    check_outputs_are_apart,
)

__all__ = [
    "BY_NUMBER",
    "HEAD",
    "HEAD_LENGTH",
    "MAX_RANK",
    "NUMBERS",
    "PADDING",
    "PROBE_OFFSET",
    "SHAPES",
    "TENSOR",
    "TensorForm",
    "assemble",
    "check_element_count",
    "check_shape",
    "decode",
    "encode",
    "room_part",
    "tensor_length",
]

HEAD: Final = struct.Struct("<QIHHHHHHQ")
"""The fixed part of a table."""

HEAD_LENGTH: Final = HEAD.size
PROBE_OFFSET: Final = struct.calcsize(HEAD.format[:-2])  # behind all but the last two fields
_WORD: Final = 8
TENSOR: Final = struct.Struct("<QQHBBHH")
"""The fixed part of a tensor, in tables and in results."""

MAX_RANK: Final = 32
"""The largest rank that every NumPy can hold."""

_MAX_INT64: Final = 2**63 - 1
_FLAGS: Final = 48  # bits between a tensor's size and its flags
_ORDER: Final = (  # TRITONSERVER_DataType, from 1
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
NUMBERS: Final[Mapping[str, int]] = {name: number for number, name in enumerate(_ORDER, 1)}
BY_NUMBER: Final[Mapping[int, DType]] = {number: dtypes.BY_NAME[name] for name, number in NUMBERS.items()}
# A named tuple's constructor without the Python function around it.
_made: Final[Callable[[type[Any], tuple[Any, ...]], Any]] = tuple.__new__

PADDING: Final = tuple(map(bytes, range(8)))
"""Zeros up to the next multiple of 8, by their number."""

SHAPES: Final = tuple(struct.Struct(f"<{rank}Q") for rank in range(MAX_RANK + 1))
"""The binary form of a shape, by its rank."""


class TensorForm(NamedTuple):
    """The constant part of an input, or of the results of an output, of one name, data type and rank."""

    dtype: DType
    rank: int
    fixed_end: tuple[int, ...]  # the end of the configured shape, from the first fixed size on
    kind: int  # all fields between size and shape as one number; add the region's number
    text: bytes  # its name, with the zeros behind it
    pack: Callable[..., bytes]  # takes offset, size, kind, the shape's sizes one by one, and text
    byte_size: int  # of the bytes that pack() returns
    unpack_from: Callable[[bytes, int], tuple[Any, ...]]

    @classmethod
    def of(cls, name: str, dtype: DType, rank: int, fixed_end: tuple[int, ...] = ()) -> TensorForm:
        kind, text, form = _form(name, NUMBERS[dtype.name], rank)
        return cls(dtype, rank, fixed_end, kind, text, form.pack, form.size, form.unpack_from)

    @classmethod
    def of_all(cls, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorForm]:
        """Return the forms of the tensors that hold numbers of a known type."""
        return {
            name: cls.of(name, dtype, len(each.shape), each.fixed_end)
            for name, each in tensors.items()
            if (dtype := each.dtype) is not None
            and dtype is not BYTES
            and len(each.shape) <= MAX_RANK
            and len(name.encode()) < 2**16
        }

    def encode(
        self, shape: tuple[int, ...], region: int, offset: int, byte_size: int, *, is_in_response: bool = False
    ) -> bytes:
        """Return one output of results in its binary form."""
        return self.pack(offset, byte_size, self.kind + region + (is_in_response << _FLAGS), *shape, self.text)


def room_part(name: str) -> tuple[Callable[..., bytes], int, bytes]:
    """Return the constant part of the room for an output, as in a form: the packing function, kind, and text."""
    kind, text, form = _form(name, 0, 0)
    return form.pack, kind, text


def _form(name: str, number: int, rank: int) -> tuple[int, bytes, struct.Struct]:
    text = name.encode()
    kind = int.from_bytes(TENSOR.pack(0, 0, 0, number, rank, len(text), 0)[2 * _WORD :], "little")
    text += PADDING[-len(text) % 8]
    return kind, text, struct.Struct(f"<QQQ{rank}Q{len(text)}s")


def tensor_length(name: str, rank: int) -> int:
    """Return how many bytes a tensor takes in a table or in results."""
    length = len(name.encode())
    return TENSOR.size + 8 * rank + length + -length % 8


def encode(table: Table) -> bytes:
    """Return a table in its binary form, without the generation in front; no tensor may exceed ``MAX_RANK``."""
    pieces = [*map(encode_claim, table.regions)]
    pack = TENSOR.pack
    for name, (dtype, shape, region, offset, byte_size) in table.inputs.items():
        text = name.encode()
        rank = len(shape)
        pieces += (
            pack(offset, byte_size, region, NUMBERS[dtype.name], rank, len(text), 0),
            SHAPES[rank].pack(*shape),
            text,
            PADDING[-len(text) % 8],
        )
    for name, (region, offset, byte_size) in table.outputs.items():
        text = name.encode()
        pieces += (pack(offset, byte_size, region, 0, 0, len(text), 0), text, PADDING[-len(text) % 8])
    return assemble(pieces, len(table.inputs), len(table.outputs), len(table.regions), table.ring)


def assemble(pieces: Sequence[bytes], inputs: int, outputs: int, regions: int = 0, ring: Ring | None = None) -> bytes:
    """Return a table in its binary form, without the generation in front, from regions and tensors in that form."""
    body = b"".join(pieces)
    frames, slot, stride = (0, 0, 0) if ring is None else (ring.frames, ring.slot, ring.stride)
    return HEAD.pack(0, HEAD.size + len(body), inputs, outputs, regions, frames, slot, 0, stride)[_WORD:] + body


def decode(  # noqa: PLR0912, PLR0915  # one function: each call in the loop would take each request a microsecond
    data: bytes, data_begin: int, byte_size: int
) -> tuple[int, Table]:
    """Check a table in the client's half of a slot's record, copied as a whole; also return the slot's generation.

    The slot's own region has ``byte_size`` bytes, and its data begins at ``data_begin``.
    TableError if the table breaks the protocol: the message names the field, and never a key, a token or a handle.
    """
    (generation, length, input_count, output_count, region_count, frames, frame_slot, probe, stride) = HEAD.unpack_from(
        data
    )
    if not HEAD.size <= length <= len(data):
        raise TableError("length", str(length), f"{HEAD.size} to {len(data)}")
    if probe:
        raise TableError("probe", str(probe), "0, or 1 or 2 for a probe")
    if input_count + output_count > MAX_TENSORS:
        raise TableError("input_count and output_count", str(input_count + output_count), f"at most {MAX_TENSORS}")
    at = HEAD.size
    claims: tuple[RegionClaim, ...] = ()
    limits = [(data_begin, byte_size)]
    if region_count:
        claims, at = decode_claims(data, at, length, region_count)
        limits += [(0, claimed_size(claim)) for claim in claims]
    inputs: dict[str, InputSpan] = {}
    outputs: dict[str, OutputSpan] = {}
    reaches = [0] * len(limits)  # each region's end so far; -1 if its tensors are not in rising order, and may overlap
    for index in range(input_count + output_count):
        begin = at + TENSOR.size
        if begin > length:
            raise TableError(_field(index, input_count), "the table's end", "a tensor")
        offset, size, region, number, rank, name_length, flags = TENSOR.unpack_from(data, at)
        name_begin = begin + 8 * rank
        name_end = name_begin + name_length
        if rank > MAX_RANK or name_end > length:
            found = f"rank {rank} and a name of {name_length} bytes"
            expected = f"at most {MAX_RANK} dimensions, and a name inside the table"
            raise TableError(_field(index, input_count), found, expected)
        if region >= len(limits) or flags:
            found = f"region {region}, flags {flags}"
            raise TableError(_field(index, input_count), found, f"0 to {len(limits) - 1}, and 0")
        least, limit = limits[region]
        if not least <= offset <= limit - size:
            found = f"{size} bytes at offset {offset}"
            expected = f"bytes from {least} to {limit}, where its region has data"
            raise TableError(_field(index, input_count), found, expected)
        try:
            name = data[name_begin:name_end].decode()
        except UnicodeDecodeError:
            name = ""
        if not name:
            raise TableError(f"{_field(index, input_count)}.name", "no valid name", "a name in UTF-8")
        if index < input_count:
            dtype = BY_NUMBER.get(number)
            if dtype is None:
                expected = f"1 to {len(_ORDER)}, a TRITONSERVER_DataType"
                raise TableError(f"inputs[{index}].datatype", str(number), expected)
            shape = SHAPES[rank].unpack_from(data, begin)
            if math.prod(shape) * dtype.itemsize != size or not size:
                check_element_count(f"inputs[{index}]", dtype, shape, size)
            inputs[name] = _made(InputSpan, (dtype, shape, region, offset, size))
        elif number or rank:
            raise TableError(_field(index, input_count), "a data type or a shape", "neither: the model decides")
        else:
            outputs[name] = _made(OutputSpan, (region, offset, size))
        if size:
            reaches[region] = offset + size if 0 <= reaches[region] <= offset else -1
        at = name_end + -name_length % 8
    if len(inputs) != input_count or len(outputs) != output_count:
        raise TableError("inputs or outputs", "a name that occurs twice", "every tensor once")
    if at != length:
        raise TableError("length", str(length), f"{at}, where the last of its tensors ends")
    ring = _ring(generation, frame_slot, frames, stride, outputs, limits) if frames else None
    table = _made(Table, (inputs, outputs, claims, ring, False))
    if frames or min(reaches) < 0:
        check_outputs_are_apart(table)
    return generation, table


def _field(index: int, input_count: int) -> str:
    return f"inputs[{index}]" if index < input_count else f"outputs[{index - input_count}]"


def check_element_count(field: str, dtype: DType, shape: tuple[int, ...], byte_size: int) -> None:
    """Raise :class:`TableError` unless a tensor of this dtype and shape can exist and have ``byte_size`` bytes."""
    count = math.prod(shape)
    if count == 0:
        check_shape(field, dtype, shape)
    if dtype is BYTES:
        if count * LENGTH_SIZE > byte_size:
            raise TableError(f"{field}.byte_size", str(byte_size), "room for the lengths of as many strings")
    elif count * dtype.itemsize != byte_size:
        raise TableError(f"{field}.byte_size", str(byte_size), "the size of its data type and shape")


def check_shape(field: str, dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise :class:`TableError` if no array can have this shape, even without elements."""
    if math.prod([size or 1 for size in shape]) * dtype.numpy.itemsize > _MAX_INT64:
        raise TableError(f"{field}.shape", "dimensions whose product has more than 63 bits", "smaller ones")


def _ring(
    generation: int,
    slot: int,
    frames: int,
    stride: int,
    outputs: Mapping[str, OutputSpan],
    limits: Sequence[tuple[int, int]],
) -> Ring:
    if generation > MAX_FRAMED_GENERATION:
        raise TableError("generation", str(generation), f"at most {MAX_FRAMED_GENERATION} for a stream")
    if frames > MAX_FRAMES:
        raise TableError("frame_count", str(frames), f"at most {MAX_FRAMES}")
    if slot + frames > MAX_SLOT_COUNT:
        raise TableError("frame_slot", str(slot), f"slots of the region, which has at most {MAX_SLOT_COUNT}")
    last_place = (frames - 1) * stride
    for name, (region, offset, byte_size) in outputs.items():
        if offset + last_place + byte_size > limits[region][1]:
            expected = f"room for {frames} frames of output '{brief(name)}' in its region"
            raise TableError("frame_stride", str(stride), expected)
    return Ring(slot, frames, stride)
