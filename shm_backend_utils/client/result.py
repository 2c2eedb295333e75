"""The result of a call: outputs as views of the slot that the model wrote them to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy.typing as npt

from ..errors import ClosedError, name_list
from ..gpu.arrays.copies import copy_of
from ..gpu.arrays.device_array import DeviceArray

__all__ = ["Arrays", "Result"]

_OF_STREAMS: Final = "triton_final_response"
_REMEDY: Final = "take arrays from it before its with block ends or release() is called; they stay valid"


class Arrays(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name that can be filled but not replaced; this class itself holds the inputs of a call."""

    _closed: tuple[str, ...] = ("this call",)
    _unknown = "this call has no input {!r}; it has {}"
    _fixed = "input {0!r} cannot be replaced, only filled; write inputs[{0!r}][...] = array"

    def __init__(self, arrays: dict[str, npt.NDArray[Any]] | None) -> None:
        self._arrays = arrays  # None after the result has dropped them

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        arrays = self._arrays
        if arrays is None:
            raise ClosedError(*self._closed)
        try:
            return arrays[name]
        except KeyError:
            raise KeyError(self._unknown.format(name, name_list(name, arrays))) from None

    def __setitem__(self, name: str, array: object) -> None:
        if array is not self[name]:  # an in-place operator assigns the same array, which is allowed
            raise TypeError(self._fixed.format(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def __repr__(self) -> str:
        return repr(self._arrays or {})

    def _held(self) -> dict[str, npt.NDArray[Any]]:
        if self._arrays is None:
            raise ClosedError(*self._closed)
        return self._arrays


@dataclass(eq=False, repr=False)
class Result(Arrays):
    """A mapping from output names to arrays, and a context manager.

    On the paths direct and triton-shm, outputs in shared memory are views of it: nothing is copied. Another call may
    use the memory when the result *and* every array taken from it are gone. :meth:`release`, or leaving the ``with``
    block, drops the result's own references.

    An output on a GPU is an array of the library that the call names, else of the library of its inputs on GPUs, else
    a :class:`DeviceArray`. Type checkers see NumPy's type, unless you assign it to a name of type ``Any``. If a stream
    still uses released memory on a GPU, name the stream in the next call's ``cuda_stream``.

    All arrays are C-contiguous, writable, and the client's own. Strings are arrays of ``bytes`` objects, which hold no
    shared memory.

    Attributes
    ----------
    path : str
        ``"direct"``, ``"triton-shm"`` or ``"inline"``: the path that this request took.
    overflowed : mapping of str to int
        Outputs that found too little room in the slot and came back through Triton, with their sizes in bytes.
    in_response : tuple of str
        Outputs that came with the response: on the path inline all; on triton-shm strings, and those of unknown size;
        on the direct path those that overflowed.
    bytes_avoided : int
        Bytes of tensors that neither the request nor its response carried.
    read_response : callable
        Returns the server's reply. It holds none of the arrays.
    """

    _arrays: dict[str, npt.NDArray[Any]] | None
    path: str
    read_response: Callable[[], Any]
    overflowed: Mapping[str, int] = field(default_factory=dict)
    bytes_avoided: int = 0
    in_response: tuple[str, ...] = ()

    _closed = "this result", _REMEDY
    _unknown = "the result has no output {!r}; it has {}"
    _fixed = "output {0!r} cannot be replaced; write result[{0!r}][...] = array"

    @property
    def response(self) -> Any:
        """The server's reply, as ``tritonclient`` returns it; of a split call, that of its first part.

        On the direct path it holds only tensors that overflowed; ``result["OUTPUT0"]`` works on every path.
        """
        return self.read_response()

    @property
    def parameters(self) -> dict[str, str | bool | int | float]:
        """The parameters that the model set as ``call.response_parameters``; of a split call, those of its first part.

        Empty if the model set none. The Python backend of Triton before 2.55 (25.02) cannot send any.
        """
        response = self.read_response().get_response()
        if isinstance(response, dict):
            parameters = response.get("parameters", {})
        else:
            parameters = {
                name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in response.parameters.items()
            }
        return {name: value for name, value in parameters.items() if name != _OF_STREAMS}

    def release(self) -> None:
        """Drop the result's arrays. Arrays that you took from it stay valid and keep their memory. Twice is fine."""
        self._arrays = None

    def copy(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all outputs: writable arrays that hold no shared memory.

        An output on a GPU is copied on that GPU, by its own library. Raises ClosedError if the result was released.
        """
        return {name: _copied(array) for name, array in self._held().items()}

    if not TYPE_CHECKING:  # type checkers must reject unknown names, such as methods of tritonclient's results

        def __getattr__(self, name: str) -> NoReturn:
            if name == "as_numpy":
                remedy = "; read an output by its name: result['OUTPUT0']"
            else:
                remedy = f"; the output is result[{name!r}]" if name in (vars(self).get("_arrays") or ()) else ""
            raise AttributeError(f"a Result has no attribute {name!r}{remedy}", name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: another process would get the arrays without their memory."""
        raise TypeError("a Result cannot be pickled or copied by module copy; use result.copy(), a dict of new arrays")

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *raised: object) -> None:
        self._arrays = None

    def __repr__(self) -> str:
        """Return one line: path, outputs, and those that came in the response although the path shares memory."""
        if self._arrays is None:
            return f"<Result path={self.path} released>"
        outputs = [f" {name!r} {array.dtype} {list(array.shape)}" for name, array in self._arrays.items()]
        copied = ""
        if self.overflowed:
            copied = f" overflowed={list(self.overflowed)}"
        elif self.in_response and self.path != "inline":
            copied = f" in_response={list(self.in_response)}"
        return f"<Result path={self.path}{','.join(outputs)}{copied}>"


def _copied(array: Any) -> Any:
    """Return a copy of an array of any library; CuPy and torch copy on their current stream."""
    if isinstance(array, DeviceArray):
        return copy_of(array)
    if hasattr(array, "clone"):  # torch's tensors
        return array.clone()
    if not hasattr(array, "copy"):
        raise TypeError(f"an array of {type(array).__module__} has no method copy(); name another library in the call")
    return array.copy()
