"""The form of the table that nearly every request of a model has. Pure.

Such a table tells of all inputs and outputs, in the order of the configuration, in the slot's own region. All else in
it is known beforehand, and is compared at once. Of every other table, right or wrong, the form says nothing: it is read
by :func:`.table.decode`, and checked against the configuration then.
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
    """Which fields such a table of one model has, and which of them are known."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inputs: list[_Input] = []
        self._outputs: list[tuple[str, int, int]] = []  # the name, the first field, the size of an element
        self._format = HEAD.format
        self._known: dict[int, int | bytes] = {2: len(spec.inputs), 3: len(spec.outputs)}
        self._known |= dict.fromkeys(range(4, _HEAD_FIELDS), 0)
        self._end = _HEAD_FIELDS
        for name, tensor in spec.inputs.items():
            assert tensor.dtype is not None
            at = self._add(name, NUMBERS[tensor.dtype.name], tensor.shape)
            shape = at + _FIELDS, at + _FIELDS + len(tensor.shape)
            self._inputs.append(_Input(name, tensor.dtype, tensor.dtype.itemsize, at, *shape))
        for name, tensor in spec.outputs.items():
            self._outputs.append((name, self._add(name, 0, ()), (tensor.dtype and tensor.dtype.itemsize) or 1))
        self._struct = struct.Struct(self._format)
        self._known[1] = self._struct.size
        self._expected = tuple(self._known.values())
        self._known_of = itemgetter(*self._known)

    @classmethod
    def of(cls, spec: ModelSpec) -> TableForm | None:
        """Return the form of a model's tables; None where the configuration does not tell how large an element is."""
        return cls(spec) if all(each.dtype and each.dtype.itemsize for each in spec.inputs.values()) else None

    def _add(self, name: str, number: int, shape: tuple[int, ...]) -> int:
        """Add a tensor's fields; return the number of the first."""
        begin, text = self._end, name.encode()
        padded = text + PADDING[-len(text) % 8]
        fields = [None, None, 0, number, len(shape), len(text), 0]  # as of TENSOR, None for what each request says
        fields += [None if size < 0 else size for size in shape]
        self._known |= {begin + index: value for index, value in enumerate([*fields, padded]) if value is not None}
        self._format += f"{TENSOR.format[1:]}{'Q' * len(shape)}{len(padded)}s"
        self._end = begin + len(fields) + 1
        return begin

    def decode(self, data: bytes, data_begin: int, byte_size: int) -> tuple[int, Table] | None:
        """Return what :func:`.table.decode` does, for a table of this form that fits the model; else None.

        Tensors lie one behind the other, and at multiples of their elements' size: more is not to be checked, if the
        region begins at one, as every mapping does.
        """
        if len(data) < self._struct.size:
            return None
        fields = self._struct.unpack_from(data)
        if self._known_of(fields) != self._expected:
            return None
        reach = data_begin
        inputs: dict[str, InputSpan] = {}
        for name, dtype, itemsize, at, begin, end in self._inputs:
            offset, size, shape = fields[at], fields[at + 1], fields[begin:end]
            if offset < reach or offset % itemsize or not size or math.prod(shape) * itemsize != size:
                return None
            inputs[name] = _made(InputSpan, (dtype, shape, 0, offset, size))
            reach = offset + size
        outputs: dict[str, OutputSpan] = {}
        for name, at, itemsize in self._outputs:
            offset, size = fields[at], fields[at + 1]
            if offset < reach or offset % itemsize:
                return None
            outputs[name] = _made(OutputSpan, (0, offset, size))
            reach = offset + size
        if reach > byte_size:
            return None
        return fields[0], _made(Table, (inputs, outputs, (), None, True))
