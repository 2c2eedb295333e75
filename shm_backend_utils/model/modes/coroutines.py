"""Calls side by side on an event loop: while one of them waits, the others go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..call import Call

__all__ = ["serve_one"]


async def serve_one(
    call: Call, infer: Callable[[Call], Awaitable[None]], fail: Callable[[Call, BaseException], None]
) -> None:
    """Begin a call, await ``infer`` on it, and end it unless a GPU has work to do for it; ``fail`` takes its error.

    Raises nothing, not even what closes the coroutine: who waits for several of them would leave the others behind.
    """
    try:
        call.begin()
        await infer(call)
        call.commit()
        if call.devices is None:
            call.end()
    except BaseException as error:
        fail(call, error)
