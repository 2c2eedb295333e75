"""Prepared calls: memory that the user fills in place, inferred once or many times."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt

from .engine import Engine, OpenCall
from .options import check_timeout
from .result import Result
from .runtime import run

__all__ = ["AsyncPreparedCall", "PreparedCall"]

Self = TypeVar("Self", bound="_Prepared")


class _Prepared:
    """A call with its own memory. A context manager; leaving it gives the memory back once no array needs it."""

    def __init__(self, engine: Engine, call: OpenCall, timeout_s: float) -> None:
        self._engine = engine
        self._call = call
        self._timeout_s = timeout_s

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        """Arrays to be filled before :meth:`infer`: views of shared memory, unless the path is inline. Not cleared."""
        return self._call.exchange.inputs

    @property
    def path(self) -> str:
        """``"direct"``, ``"triton-shm"`` or ``"inline"``: the way that the tensors go."""
        return self._call.exchange.path

    def close(self) -> None:
        """Give the memory back, as soon as no array needs it. Twice is fine."""
        self._call.exchange.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _infer(self, timeout_s: float | None) -> Result:
        patience_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        with self._engine.tally.failures():
            return await self._engine.send(self._call, patience_s)


class PreparedCall(_Prepared):
    """A call with its own memory, of a :class:`ShmClient`."""

    def infer(self, *, timeout_s: float | None = None) -> Result:
        """Run the model on what is in :attr:`inputs` now. May be called again; arrays of the last result change then.

        Raises
        ------
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer. The model may still be executing, or begin to.
        SlotInDoubtError
            It may still be executing an earlier request of this call, which got no answer.
        PeerError
            The model answered, but not by this protocol.
        """
        return run(self._infer(timeout_s))


class AsyncPreparedCall(_Prepared):
    """A call with its own memory, of an :class:`AsyncShmClient`. Its context manager needs no ``async``."""

    async def infer(self, *, timeout_s: float | None = None) -> Result:
        """Run the model on what is in :attr:`inputs` now. As :meth:`PreparedCall.infer`."""
        return await self._infer(timeout_s)
