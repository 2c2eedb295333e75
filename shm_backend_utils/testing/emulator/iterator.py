"""The responses to a request that a model made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .response import InferenceResponse

if TYPE_CHECKING:
    from .request import InferenceRequest

__all__ = ["ResponseIterator"]


class ResponseIterator:
    """The responses to a request that a model made, as they come; once all are there, they can be had again.

    It is made with the first, which here is the only one.
    """

    __slots__ = ("__weakref__", "_coming", "_have", "_is_finished", "_next", "_request")

    def __init__(self, response: InferenceResponse) -> None:
        self._have = [response]
        self._next = 0
        self._coming: Iterator[tuple[InferenceResponse, bool]] = iter(())
        self._is_finished = True
        self._request: InferenceRequest | None = None

    @classmethod
    def _of(cls, coming: Iterator[tuple[InferenceResponse, bool]], request: InferenceRequest) -> ResponseIterator:
        """Return one over responses, of which the first is waited for; beside each is whether it is the last."""
        response, is_last = next(coming)
        made = cls(response)
        made._coming = coming
        made._is_finished = is_last
        made._request = request
        return made

    def __iter__(self) -> ResponseIterator:
        if self._is_finished and self._next >= len(self._have):
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._next == len(self._have) and not self._is_finished:
            response, self._is_finished = next(self._coming)
            self._have.append(response)
        if self._next == len(self._have):
            raise StopIteration("Iteration is done for the responses.")
        self._next += 1
        return self._have[self._next - 1]

    def cancel(self) -> None:
        """Give the request up; from Triton 25.04 on."""
        if not self._is_finished and self._request is not None:
            self._request._host.cancel(self._request)
