"""Tensors of strings in Triton's form: for each element its length, 32 bits little-endian, then its bytes.

The bytes come from a peer. So this module reads each length and element from shared memory once, and then checks it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from ..dtypes import LENGTH_SIZE
from ..errors import TensorError, TensorTypeError

__all__ = ["Strings"]

_LENGTH: Final = struct.Struct("<I")


class Strings(Sequence[bytes]):
    """The elements of a tensor of strings, in C order. They are converted when you first access them."""

    def __init__(
        self, tensor: str, shape: tuple[int, ...], encoded: npt.NDArray[np.uint8] | None, given: npt.NDArray[Any] | None
    ) -> None:
        self.shape = shape
        self._tensor = tensor
        self._encoded = encoded
        self._given = given
        self._elements: list[bytes] | None = None

    @classmethod
    def encoded_as(cls, tensor: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> Strings:
        """Return strings over encoded bytes, which other bytes may follow; elements are checked when accessed."""
        return cls(tensor, shape, data, None)

    @classmethod
    def of(cls, tensor: str, elements: npt.NDArray[Any]) -> Strings:
        """Return strings from an array of ``bytes`` or ``str``; the latter become UTF-8."""
        return cls(tensor, elements.shape, None, elements)

    def afresh(self) -> Strings:
        """Return the same strings, not read yet: shared memory may contain other strings by now."""
        return Strings(self._tensor, self.shape, self.memory, self._given)

    @property
    def encoded(self) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, and maybe other bytes after them; TensorTypeError if an element is not a string."""
        if self._encoded is None:
            self._encoded = np.frombuffer(self.packed(), np.uint8)
        return self._encoded

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """The memory with the strings' bytes, and any bytes after them; None if the strings were given as objects."""
        return self._encoded if self._given is None else None

    def packed(self) -> bytes:
        """Return exactly the tensor's bytes; raises like :meth:`__getitem__`."""
        pack = _LENGTH.pack
        pieces: list[bytes] = []
        for element in self._all():
            pieces += (pack(len(element)), element)
        return b"".join(pieces)

    def numpy(self) -> npt.NDArray[np.object_]:
        """Return the strings as an array of ``bytes`` in the tensor's shape; raises like :meth:`__getitem__`."""
        array = np.empty(len(self), object)
        array[:] = self._all()
        return array.reshape(self.shape)

    def __repr__(self) -> str:
        return f"<Strings {self._tensor!r} {list(self.shape)}>"

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Return an element, or a slice; TensorError if a length leads beyond the bytes, or an element is no string."""
        return self._all()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    def _all(self) -> list[bytes]:
        if self._elements is None:
            if self._given is not None:
                self._elements = [_as_bytes(self._tensor, element) for element in self._given.ravel().tolist()]
            else:
                assert self._encoded is not None
                self._elements = _decode(self._tensor, self._encoded, math.prod(self.shape))
        return self._elements


def _as_bytes(tensor: str, element: object) -> bytes:
    if isinstance(element, bytes):
        return b"".join((element,))  # plain bytes, even from a subclass, as serializers compare types exactly
    if isinstance(element, str):
        try:
            return str.encode(element)
        except UnicodeEncodeError as error:
            raise TensorTypeError(tensor, f"tensor {tensor!r} holds text that UTF-8 cannot encode: {error}") from None
    raise TensorTypeError(
        tensor, f"tensor {tensor!r} holds an element of type {type(element).__name__}; expected str or bytes"
    )


def _decode(tensor: str, encoded: npt.NDArray[np.uint8], count: int) -> list[bytes]:
    size, begin = encoded.nbytes, 0
    elements: list[bytes] = []
    if count * LENGTH_SIZE <= size:
        data, append, read_length = encoded.data, elements.append, _LENGTH.unpack_from
        for _ in range(count):
            if begin > size - LENGTH_SIZE:
                break
            begin += LENGTH_SIZE
            end = begin + read_length(data, begin - LENGTH_SIZE)[0]
            if end > size:
                break
            append(bytes(data[begin:end]))
            begin = end
    if len(elements) != count:
        raise TensorError(
            tensor, f"tensor {tensor!r} has {size} bytes, but the lengths of its strings lead beyond them"
        )
    return elements
