"""Errors for code that takes a view for an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["NoArray"]


class NoArray:
    """A base of views: if code uses one as an array, the error says how to make an array of it."""

    __slots__ = ()

    name: str

    def _as_array(self) -> str:
        """Return what makes an array of it."""
        return "np.asarray(view), or torch.from_dlpack(view), or another library's"

    if not TYPE_CHECKING:  # type checkers must not see these

        def __getattr__(self, attribute: str) -> Any:
            if attribute == "name" or attribute.startswith("__"):  # the view is not made yet, or a protocol asks
                raise AttributeError(attribute)
            raise AttributeError(
                f"this {type(self).__name__} has no attribute {attribute!r}; make an array of tensor {self.name!r} "
                f"first: {self._as_array()}"
            )

        def _no_operand(self, *_: object) -> NoReturn:
            raise TypeError(
                f"this {type(self).__name__} is no array to calculate with, or to take elements of; make one of tensor "
                f"{self.name!r} first: {self._as_array()}"
            )

        __getitem__ = __setitem__ = __iter__ = _no_operand
        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _no_operand
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rmatmul__ = _no_operand
        __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _no_operand
