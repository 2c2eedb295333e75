"""The usual form of a table: all inputs in the configuration's order, then outputs, in the slot's own region. Pure.

One step compares all fields that are known in advance. :func:`.table.decode` reads tables of any other form.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

from ..dtypes import DType
from ..model_spec import ModelSpec
from .spans import InputSpan, OutputSpan, Table
from .table import NUMBERS, PADDING, TENSOR

__all__ = ["TableForm"]

_HEAD: Final = "<QIHH16s"  # generation, length, the counts of inputs and outputs; zeros for regions, ring and probe
_output: Final = struct.Struct("<QQ4xH").unpack_from  # offset, size and the length of the name
# A named tuple's constructor without the Python function around it.
_made: Final[Callable[..., Any]] = tuple.__new__
# An input: name, data type, element size, and a getter of its offset, size and shape from all fields.
_Input = tuple[str, DType, int, Callable[[tuple[Any, ...]], Any]]


class TableForm:
    """The usual form of one model's tables: their fields, and the values that are known in advance."""

    def __init__(self, spec: ModelSpec) -> None:
        self._inputs: list[_Input] = []
        self._outputs: dict[bytes, tuple[str, int, int]] = {}  # by bytes after the extent: name, itemsize, length
        form = _HEAD
        known: dict[int, int | bytes] = {2: len(spec.inputs), 4: bytes(16)}
        end = 5
        for name, tensor in spec.inputs.items():
            assert tensor.dtype is not None
            text, rank, begin = name.encode(), len(tensor.shape), end + 3
            padded = text + PADDING[-len(text) % 8]
            form += f"QQ8s{'Q' * rank}{len(padded)}s"
            known[end + 2] = TENSOR.pack(0, 0, 0, NUMBERS[tensor.dtype.name], rank, len(text), 0)[16:]
            known |= {begin + axis: size for axis, size in enumerate(tensor.shape) if size >= 0}
            known[begin + rank] = padded
            span_of = itemgetter(end, end + 1, slice(begin, begin + rank))
            self._inputs.append((name, tensor.dtype, tensor.dtype.itemsize, span_of))
            end = begin + rank + 1
        for name, tensor in spec.outputs.items():
            text, itemsize = name.encode(), (tensor.dtype and tensor.dtype.itemsize) or 1
            head = TENSOR.pack(0, 0, 0, 0, 0, len(text), 0)[16:]
            self._outputs[head + text] = (name, itemsize, TENSOR.size + len(text) + -len(text) % 8)
        self._size, self._fields_of = struct.calcsize(form), struct.Struct(form).unpack_from
        self._known = tuple(known.values())
        self._known_of = itemgetter(*known)

    @classmethod
    def of(cls, spec: ModelSpec) -> TableForm | None:
        """Return the form of a model's tables; None if an input has no type, holds strings, or is reshaped."""
        inputs = spec.inputs.values()
        return cls(spec) if all(t.dtype and t.dtype.itemsize and t.reshape is None for t in inputs) else None

    def decode(self, data: bytes, generation: int, data_begin: int, byte_size: int) -> Table | None:
        """Return a table of this form and generation that fits the model, as :func:`.table.decode` does; else None.

        Each tensor must begin after the one before, at a multiple of its element size: so no tensors can overlap.
        """
        inputs: dict[str, InputSpan] = {}
        outputs: dict[str, OutputSpan] = {}
        try:
            fields = self._fields_of(data)
            length, reach = fields[1], data_begin
            if fields[0] != generation or self._known_of(fields) != self._known or length > len(data):
                return None
            for name, dtype, itemsize, span_of in self._inputs:
                offset, size, shape = span_of(fields)
                if offset < reach or offset % itemsize or not size or math.prod(shape) * itemsize != size:
                    return None
                inputs[name] = _made(InputSpan, (dtype, shape, 0, offset, size))
                reach = offset + size
            at = self._size
            while at < length:
                offset, size, name_length = _output(data, at)
                name, itemsize, step = self._outputs[data[at + 16 : at + 24 + name_length]]
                if offset < reach or offset % itemsize:
                    return None
                outputs[name] = _made(OutputSpan, (0, offset, size))
                reach = offset + size
                at += step
        except (KeyError, struct.error):
            return None
        if at != length or len(outputs) != fields[3] or reach > byte_size:
            return None
        table: Table = _made(Table, (inputs, outputs, (), None, True))
        return table
