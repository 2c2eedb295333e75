"""Which line of the user's code a message names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import gevent
import pytest

from shm_backend_utils.client.aio import AsyncShmClient
from shm_backend_utils.origin import Origin


def here() -> int:
    """Return the line that the caller is at."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_an_origin_names_what_began_and_its_file_and_line() -> None:
    line = here() + 1
    origin = Origin.here("infer")
    assert str(origin) == f"infer at {__file__}:{line}"


def origin_of(call: Coroutine[Any, Any, Any]) -> str:
    """Return the origin of a call that has not begun, and drop the call."""
    origin = str(inspect.getcoroutinelocals(call)["settings"].origin)
    call.close()
    return origin


@pytest.fixture
def client() -> Iterator[AsyncShmClient]:
    """A client that never calls its server."""
    client = AsyncShmClient("localhost:8001")
    yield client
    asyncio.run(client.close())


@pytest.mark.parametrize("what", ["infer", "prepare"])
def test_the_line_that_calls_an_async_client_is_named_although_nothing_has_run_yet(
    client: AsyncShmClient, what: str
) -> None:
    begin = getattr(client, what)
    line = here() + 1
    call = begin("model", {})
    assert origin_of(call) == f"{what} at {__file__}:{line}"


def test_the_lines_of_the_client_itself_are_passed_over(client: AsyncShmClient) -> None:
    async def main() -> tuple[str, int]:
        line = here() + 1
        task = client.submit("model", {})
        origin = inspect.getcoroutinelocals(task.get_coro())["settings"].origin  # type: ignore[arg-type]
        task.cancel()
        await asyncio.wait([task])
        return str(origin), line

    origin, line = asyncio.run(main())
    assert origin == f"infer at {__file__}:{line}"


def test_a_call_that_no_line_of_python_has_made_has_an_origin_too(client: AsyncShmClient) -> None:
    call = gevent.spawn(client.infer, "model", {}).get()  # a greenlet's first frame is the function that it runs
    assert origin_of(call).startswith("infer at ")


def test_a_function_that_runs_in_an_event_loop_is_named() -> None:
    async def main() -> Any:
        made: asyncio.Future[Origin] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: made.set_result(Origin.here("infer")))
        return await made

    assert str(asyncio.run(main())).startswith(f"infer at {__file__}:")


def test_where_no_line_is_the_users_there_still_is_an_origin() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert str(thread.submit(Origin.here, "infer").result()).startswith(f"infer at {threading.__file__}:")


def test_the_line_is_that_of_the_instruction_wherever_in_a_function_it_is() -> None:
    first = here() + 1
    origins = [
        Origin.here("first"),
        *[Origin.here(f"{number}") for number in range(2)],
        Origin.here("last"),
    ]
    assert [origin.line - first for origin in origins] == [1, 2, 2, 3]
