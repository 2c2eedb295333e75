"""Calls side by side on an event loop: while one of them waits, the others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ...errors import SlotInUseError
from ..call import Call
from ..mapping.mapped import PATIENCE_S, PAUSE_S

__all__ = ["serve_one"]


async def serve_one(
    call: Call, infer: Callable[[Call], Awaitable[None]], fail: Callable[[Call, BaseException], None]
) -> None:
    """Begin a call, await ``infer`` on it, and end it unless a GPU has work to do for it; ``fail`` takes its error."""
    try:
        await _begin(call)
        await infer(call)
        call.commit()
        if call.devices is None:
            call.end()
    except GeneratorExit:  # the coroutine itself is closed, and may not go on
        call.fail(asyncio.CancelledError("execute was left"))
        raise
    except BaseException as error:
        fail(call, error)


async def _begin(call: Call) -> None:
    """Begin a call; while somebody else holds its slot, the event loop goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            call.begin(0)
        except SlotInUseError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return
