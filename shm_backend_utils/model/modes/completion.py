"""How calls end: one by one on an event loop, or all at once when GPUs have finished their work for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence

from ...errors import ModelError
from ...gpu.model import DeviceArrays
from ..call import Call

__all__ = ["check_has_run", "complete", "complete_by_events", "serve_one"]


def complete(calls: Sequence[Call], arrays: DeviceArrays) -> None:
    """Wait for GPUs and end committed calls: all well, or all by an error, as CUDA does not say whose work failed."""
    try:
        arrays.wait([call.devices for call in calls if call.devices is not None])
    except BaseException as error:  # whatever it is, every call needs its response
        for call in calls:
            call.fail(error)
        return
    for call in calls:
        if call.devices is not None:
            call.devices.release()
        call.end()


def complete_by_events(calls: Sequence[Call], arrays: DeviceArrays) -> None:
    """End calls as :func:`complete` does, but wait for none that its client can wait for by events of its own."""
    now: list[Call] = []
    for call in calls:
        regions = call.event_regions
        if not regions:
            now.append(call)
            continue
        assert call.devices is not None
        try:
            arrays.record(call.devices, regions.values())
        except BaseException as error:  # whatever it is, the call needs its response
            call.fail(error)
        else:
            call.devices.leave()
            call.end(list(regions))
    if now:
        complete(now, arrays)


async def serve_one(
    call: Call, infer: Callable[[Call], Awaitable[None]], fail: Callable[[Call, BaseException], None]
) -> None:
    """Begin a call, await ``infer`` on it, and end it unless a GPU has work to do for it; ``fail`` takes its error."""
    try:
        call.begin()
        await infer(call)
        call.commit()
        if call.devices is None:
            call.end()
    except BaseException as error:
        fail(call, error)


def check_has_run(returned: object) -> None:
    """Raise ModelError for the result of a function whose body has not begun: a generator, or a coroutine."""
    if isinstance(returned, Generator):
        raise ModelError("the function yields, so nothing of it ran; generators are for serve_streams")
    if isinstance(returned, Coroutine):
        returned.close()
        raise ModelError("the function is async, so nothing of it ran; async functions are for serve_async")
