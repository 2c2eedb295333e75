"""The form that the table of nearly every request of a model has. Pure.

Such a table tells of all inputs, in the order of the configuration, and of outputs, in the slot's own region. What is
known of the inputs beforehand is compared at once. Of every other table, right or wrong, the form says nothing: it is
read by :func:`.table.decode`, and checked against the configuration then.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple

from ..dtypes import DType
from ..model_spec import ModelSpec
from .spans import InputSpan, OutputSpan, Table
from .table import HEAD, NUMBERS, PADDING, TENSOR

__all__ = ["TableForm"]

_HEAD_FIELDS: Final = 9
_INPUT_COUNT: Final = 2
_ZEROS: Final = range(4, _HEAD_FIELDS)  # no further regions, no ring, no probe
_NO_OUTPUT: Final = ("", 1)
_FIELDS: Final = 7  # of a tensor, before its shape and its name
# What a named tuple's own constructor does, without the function around it.
_made: Final[Callable[[type[Any], tuple[Any, ...]], Any]] = tuple.__new__


class _Input(NamedTuple):
    name: str
    dtype: DType
    itemsize: int
    at: int  # its first field
    shape_begin: int
    shape_end: int


class TableForm:
    """Which fields such a table of one model begins with, and which of them are known."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inputs: list[_Input] = []
        self._outputs = {
            name.encode(): (name, (tensor.dtype and tensor.dtype.itemsize) or 1)
            for name, tensor in spec.outputs.items()
        }
        form, end = HEAD.format, _HEAD_FIELDS
        known: dict[int, int | bytes] = {_INPUT_COUNT: len(spec.inputs), **dict.fromkeys(_ZEROS, 0)}
        for name, tensor in spec.inputs.items():
            assert tensor.dtype is not None
            text, rank, begin = name.encode(), len(tensor.shape), end + _FIELDS
            padded = text + PADDING[-len(text) % 8]
            fields = [None, None, 0, NUMBERS[tensor.dtype.name], rank, len(text), 0]  # None for what requests say
            fields += [None if size < 0 else size for size in tensor.shape]
            known |= {end + index: value for index, value in enumerate([*fields, padded]) if value is not None}
            self._inputs.append(_Input(name, tensor.dtype, tensor.dtype.itemsize, end, begin, begin + rank))
            form += f"{TENSOR.format[1:]}{'Q' * rank}{len(padded)}s"
            end = begin + rank + 1
        self._struct = struct.Struct(form)
        self._known = tuple(known.values())
        self._known_of = itemgetter(*known)

    @classmethod
    def of(cls, spec: ModelSpec) -> TableForm | None:
        """Return the form of a model's tables; None where the configuration does not tell how large an element is."""
        return cls(spec) if all(each.dtype and each.dtype.itemsize for each in spec.inputs.values()) else None

    def decode(self, data: bytes, data_begin: int, byte_size: int) -> tuple[int, Table] | None:
        """Return what :func:`.table.decode` does, for a table of this form that fits the model; else None.

        Tensors lie one behind the other, and at multiples of their elements' size: more is not to be checked, if the
        region begins at one, as every mapping does.
        """
        if len(data) < self._struct.size:
            return None
        fields = self._struct.unpack_from(data)
        generation, length, _, output_count, *_ = fields
        if self._known_of(fields) != self._known or length > len(data):
            return None
        reach = data_begin
        inputs: dict[str, InputSpan] = {}
        for name, dtype, itemsize, at, begin, end in self._inputs:
            offset, size, shape = fields[at], fields[at + 1], fields[begin:end]
            if offset < reach or offset % itemsize or not size or math.prod(shape) * itemsize != size:
                return None
            inputs[name] = _made(InputSpan, (dtype, shape, 0, offset, size))
            reach = offset + size
        at = self._struct.size
        outputs: dict[str, OutputSpan] = {}
        while at < length - TENSOR.size:
            offset, size, region, number, rank, name_length, flags = TENSOR.unpack_from(data, at)
            at += TENSOR.size
            name, itemsize = self._outputs.get(data[at : at + name_length], _NO_OUTPUT)
            if not name or offset < reach or offset % itemsize or region or number or rank or flags:
                return None
            outputs[name] = _made(OutputSpan, (0, offset, size))
            reach = offset + size
            at += name_length + -name_length % 8
        if at != length or len(outputs) != output_count or reach > byte_size:
            return None
        return generation, _made(Table, (inputs, outputs, (), None, True))
