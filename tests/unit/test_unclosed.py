"""Which line of the user's code a message names; what was not closed says so with that line when it is garbage."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import gevent
import numpy as np
import pytest

from shm_backend_utils.client import AsyncShmClient, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.model import ShmSession
from shm_backend_utils.model.config import Config
from shm_backend_utils.process import Origin, Unclosed
from tests.unit.fake_server import FakeServer
from tests.unit.fake_wires import FakeTransport
from tests.unit.sessions import session_of, tensor

pytestmark = pytest.mark.usefixtures("server_of_every_client")
URL: Final = "localhost:8001"
X: Final = np.arange(6, dtype=np.float32)
INPUTS: Final[Any] = {"IN0": ((6,), np.float32)}
AT_SERVER: Final = ": the server keeps the memory that it has registered there"
SYNC: Final = "call close(), or use it in a with statement"
ASYNC: Final = "await close(), or use it in an async with statement"


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


class Told:
    """The warnings of what a function leaves behind. It returns the line that made what it leaves."""

    def __init__(self, use: Callable[[], int]) -> None:
        gc.collect()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            self.line = use()
            gc.collect()
        self.warnings = [each for each in found if "was not closed" in str(each.message)]
        self.texts = [str(each.message) for each in self.warnings]

    def expected(self, what: str, rest: str, advice: str) -> list[str]:
        return [f"the {what} made at {__file__}:{self.line} was not closed{rest}; {advice}"]


@pytest.mark.parametrize("is_aio", [False, True], ids=["blocking", "aio"])
@pytest.mark.parametrize(
    ("path", "is_closed"),
    [("triton-shm", True), ("direct", False), ("triton-shm", False), ("inline", False)],
)
def test_an_unclosed_client_names_its_line(server: FakeServer, is_closed: bool, path: PathName, is_aio: bool) -> None:
    def use() -> int:
        made, line = ShmClient(URL), here()
        made.infer("m", {"IN0": X}, path=path).release()
        if is_closed:
            made.close()
        return line

    async def use_in_a_task() -> int:
        made, line = AsyncShmClient(URL), here()
        (await made.infer("m", {"IN0": X}, path=path)).release()
        if is_closed:
            await made.close()
        return line

    told = Told((lambda: asyncio.run(use_in_a_task())) if is_aio else use)
    rest = AT_SERVER if path == "triton-shm" else ""
    what = ("AsyncShmClient", rest, ASYNC) if is_aio else ("ShmClient", rest, SYNC)
    assert told.texts == ([] if is_closed else told.expected(*what))
    assert bool(server.registered) is bool(told.texts and rest)


def test_the_warning_itself_is_of_that_line() -> None:
    told = Told(lambda: (ShmClient(URL), here())[1])
    assert [(each.filename, each.lineno) for each in told.warnings] == [(__file__, told.line)]
    assert [each.category for each in told.warnings] == [ResourceWarning]
    assert Told(lambda: (AsyncShmClient(URL), here())[1]).texts == [], "no task has used it"


def test_a_client_whose_server_does_not_answer_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionError

    def use() -> int:
        with pytest.raises(ConnectionError):
            ShmClient(URL)
        return 0

    monkeypatch.setattr(FakeTransport, "send", refuse)
    assert Told(use).texts == []


@pytest.mark.parametrize("closed", ["nothing", "call", "client"])
def test_a_prepared_call_that_was_not_closed_names_its_line(closed: str) -> None:
    with ShmClient(URL) as made:

        def use() -> int:
            call, line = made.prepare("m", INPUTS), here()
            if closed == "call":
                call.close()
            elif closed == "client":
                made.close()
            return line

        told = Told(use)
    assert told.texts == (told.expected("PreparedCall", "", SYNC) if closed == "nothing" else [])


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_so_does_a_prepared_call_of_tasks(is_closed: bool) -> None:
    async def use() -> int:
        async with AsyncShmClient(URL) as made:
            call, line = await made.prepare("m", INPUTS), here()
            if is_closed:
                call.close()
            del call
            await asyncio.sleep(0)  # CPython itself holds it until then, where an awaited error came before it
            gc.collect()
        return line

    told = Told(lambda: asyncio.run(use()))
    assert told.texts == ([] if is_closed else told.expected("AsyncPreparedCall", "", SYNC))


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_session_that_was_not_closed_names_its_line(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    def use() -> int:
        with session_of(monkeypatch, [tensor("X")], [tensor("Y")]) as first:
            session, line = ShmSession(first._open_context().spec, Config.from_config({"name": "m"})), here()
            if is_closed:
                session.close()
        return line

    told = Told(use)
    assert told.texts == ([] if is_closed else told.expected("ShmSession", "", "call close() in finalize()"))


def test_a_forked_child_says_nothing() -> None:
    guard = [Unclosed(Origin.here("the thing made"), "close it")]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = len(Told(lambda: len([guard.pop()])).texts)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    told = Told(lambda: len([guard.pop()]))
    assert len(told.texts) == 1


@pytest.mark.parametrize("advice", ["always", "error", "ignore"])
def test_at_the_end_of_the_interpreter_nothing_else_goes_wrong(advice: str) -> None:
    program = (
        "import sys\n"
        "from shm_backend_utils.process import Origin\n"
        "from shm_backend_utils.process import Unclosed\n"
        "kept = Unclosed(Origin.here('the thing made'), 'close it')\n"
        "sys.kept_for_longer = Unclosed(Origin.here('the other thing made'), 'close it')\n"
        "sys.modules['shm_backend_utils.process'].kept_for_longest = sys.kept_for_longer\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", f"{advice}::ResourceWarning", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "Error" in line or "Exception ignored" in line]
    assert advice == "error" or told == [], done.stderr
    assert all("ResourceWarning" in line or "Exception ignored" in line for line in told), done.stderr
    assert ("the thing made at <string>:4 was not closed; close it" in done.stderr) is (advice != "ignore")


def origin_of(call: Coroutine[Any, Any, Any]) -> str:
    operation = inspect.getcoroutinelocals(call)["operation"]
    is_begun = inspect.isgenerator(operation)  # else it has its settings among its arguments
    settings = inspect.getgeneratorlocals(operation)["settings"] if is_begun else operation.args[1]
    origin = str(settings.origin)
    call.close()
    return origin


@pytest.fixture
def idle() -> Iterator[AsyncShmClient]:
    client = AsyncShmClient(URL)
    yield client
    asyncio.run(client.close())


@pytest.mark.parametrize("what", ["infer", "prepare"])
def test_the_line_of_an_async_call_is_named_before_it_runs(idle: AsyncShmClient, what: str) -> None:
    begin = getattr(idle, what)
    line = here() + 1
    call = begin("model", {})
    assert origin_of(call) == f"{what} at {__file__}:{line}"


def test_a_call_that_no_line_of_the_users_has_made_has_an_origin_too(idle: AsyncShmClient) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert str(thread.submit(Origin.here, "infer").result()).startswith(f"infer at {threading.__file__}:")
    call = gevent.spawn(idle.infer, "model", {}).get()  # a greenlet's first frame is the function that it runs
    assert origin_of(call).startswith("infer at ")


def test_the_line_is_that_of_the_instruction_wherever_in_a_function_it_is() -> None:
    first = here() + 1
    origins = [
        Origin.here("first"),
        *[Origin.here(f"{number}") for number in range(2)],
        Origin.here("last"),
    ]
    assert [origin.line - first for origin in origins] == [1, 2, 2, 3]
    assert str(origins[0]) == f"first at {__file__}:{first + 1}"
