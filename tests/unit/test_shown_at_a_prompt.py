"""What objects show at a prompt, and what those say that nobody closed, with the line of the user's code."""

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

from shm_backend_utils.client import AsyncShmClient, PoolOptions, ShmClient
from shm_backend_utils.client.explanation import Check, ClientStats, Explanation, Tally
from shm_backend_utils.client.options import PathName
from shm_backend_utils.compat.attach import CudaRegion
from shm_backend_utils.memory.pool.options import PoolStatus
from shm_backend_utils.model import ShmSession, StreamCall
from shm_backend_utils.model.config import Config
from shm_backend_utils.process import Origin, Unclosed
from tests.unit.emulated import delivered
from tests.unit.fake_server import FakeServer
from tests.unit.fake_wires import FakeTransport
from tests.unit.sessions import session_of, tensor
from tests.unit.side_by_side import side_by_side

pytestmark = pytest.mark.usefixtures("server_of_every_client")
X: Final = np.arange(6, dtype=np.float32)


SHOWN: Final = {
    "localhost:8001": "grpc://localhost:8001",
    "http://localhost:8000": "http://localhost:8000",
    "https://user:secret@host:8000/triton": "https://host:8000/triton",
    "http://host:8000/triton?token=secret": "http://host:8000/triton",
    "http://ho\nst:8000": "http://ho\\nst:8000",
}


def test_a_client_shows_its_server_and_path_and_whether_it_is_open() -> None:
    for url, shown in SHOWN.items():
        with ShmClient(url, path="direct") as made:
            assert repr(made) == f"<ShmClient '{shown}' path=direct open>"
            made._core.is_forked = True  # type: ignore[union-attr]  # as in a child
            assert repr(made) == f"<ShmClient '{shown}' path=direct forked>"
            made._core.is_forked = False  # type: ignore[union-attr]
        assert repr(made) == f"<ShmClient '{shown}' path=direct closed>"

    async def main() -> list[str]:
        made = AsyncShmClient("localhost:8001")
        shown = [repr(made)]
        async with made:
            shown.append(repr(made))
        return [*shown, repr(made)]

    begin = "<AsyncShmClient 'grpc://localhost:8001' path=auto"
    assert asyncio.run(main()) == [f"{begin} not connected yet>", f"{begin} open>", f"{begin} closed>"]


def test_what_could_not_be_made_and_what_holds_a_secret_can_be_shown() -> None:
    for kind in (ShmClient, AsyncShmClient, ShmSession):
        assert "\n" not in repr(kind.__new__(kind))
    region = CudaRegion(b"secret", 1, 4096)
    assert repr(region) == str(region) == "CudaRegion(device_id=1, byte_size=4096)"
    assert "max_bytes=4096" in repr(PoolOptions(max_bytes=4096))
    assert "\n" not in repr(PoolOptions())


def test_a_prepared_call_shows_its_inputs_and_a_result_which_outputs_found_no_room() -> None:
    with ShmClient("localhost:8001") as made:
        call = made.prepare("m", {"IN0": ((6,), np.float32)}, path="triton-shm")
        assert repr(call) == "<PreparedCall 'm' path=triton-shm 'IN0' FP32 [6], open>"
        call.close()
        assert repr(call) == "<PreparedCall 'm' path=triton-shm 'IN0' FP32 [6], closed>"
        first, second = made.infer("m", {"IN0": X}), made.infer("m", {"IN0": X})
        assert repr(first) == "<Result path=direct 'OUT0' float32 [6] overflowed=['OUT0']>"
        assert repr(second) == "<Result path=direct 'OUT0' float32 [6]>"
        second.release()
        assert repr(second) == "<Result path=direct released>"
        call = made.prepare("m", {"IN0": ((6,), np.float32)}, path="inline")
    assert repr(call) == "<PreparedCall 'm' path=inline 'IN0' FP32 [6], closed>"
    call.close()


def test_sessions_and_calls_show_their_model_and_how_far_they_are(
    session: ShmSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repr(session) == "<ShmSession 'm' open>"
    call = session.open(delivered({}, ["Y"], {"X": X}))
    assert repr(call) == "<Call 'm' path=triton outputs=[] closed>"
    with call:
        assert repr(call) == "<Call 'm' path=triton outputs=[] open>"
        call.put("Y", call.input("X"))
        assert repr(call) == "<Call 'm' path=triton outputs=['Y'] open>"
    assert repr(call) == "<Call 'm' path=triton outputs=['Y'] closed>"
    session.close()
    assert repr(session) == "<ShmSession 'm' closed>"
    calls: list[Any] = []
    shown: list[str] = []

    def infer(call: Any) -> None:
        calls.append(call)
        shown.append(repr(call))
        call.put("Y", call.input("X"))

    def answer(call: StreamCall) -> Iterator[None]:
        for _ in range(2):
            infer(call)
            yield

    with session_of(monkeypatch, [tensor("X"), tensor("SHM", "UINT8")], [tensor("Y")], max_batch_size=8) as batches:
        batches.serve_batch([delivered({}, ["Y"], {"X": X.reshape(1, 6)}) for _ in range(3)], infer)
    decoupled = {"decoupled": True}
    with session_of(monkeypatch, [tensor("X")], [tensor("Y")], model_transaction_policy=decoupled) as streams:
        streams.serve_streams([delivered({}, ["Y"], {"X": X})], answer)
    sent = [f"<StreamCall 'm' path=triton sent={number} open>" for number in range(2)]
    assert shown == ["<BatchCall 'm' calls=3 rows=3 open>", *sent]
    assert repr(calls[0]) == "<BatchCall 'm' calls=3 rows=3 closed>"
    assert repr(calls[1]) == "<StreamCall 'm' path=triton sent=2 closed>"


NASTY = "it says: <script>&\n\tno"
EXPLANATION = Explanation(
    "m<1>",
    "inline",
    NASTY,
    (
        Check("declares direct?", False, NASTY, ("direct",)),
        Check("a name that is longer than all of the others?", None, "nobody knows", ()),
        Check("here?", True, "yes", ()),
    ),
)
STATS = ClientStats(1234567, 1, 0, 2**30, {"direct": 1234, "inline": 3}, {"m": f"direct: {NASTY}"}, 0, 1, 2, 3, 4, 5)


def test_an_explanation_and_figures_are_shown_as_tables() -> None:
    assert repr(EXPLANATION).splitlines() == [
        "model 'm<1>' takes the path inline: it says: <script>& no",
        "  declares direct?                               no       it says: <script>& no",
        "  a name that is longer than all of the others?  unknown  nobody knows",
        "  here?                                          yes      yes",
    ]
    title, *lines = repr(STATS).splitlines()
    assert title == "what the client has done"
    assert "  requests        1,234,567" in lines
    assert "  paths direct    1,234" in lines
    assert "  reasons m       direct: it says: <script>& no" in lines
    assert len({line.index(line.split()[-1]) for line in lines if "reasons" not in line}) == 1


POOL = PoolStatus(held=1, idle=2, quarantined=3, byte_size=4, max_bytes=5)


def test_calls_of_all_threads_are_counted_by_their_path_with_the_bytes_that_did_not_cross_the_network() -> None:
    tally = Tally()

    def stats() -> ClientStats:
        return tally.stats({"resize": "direct: nothing prevents it"}, 6, POOL)

    def work() -> None:
        for path in ("direct", "inline", "direct") * 500:
            tally.succeeded(path, 10 if path == "direct" else 0)
            tally.retried()

    before = stats()
    side_by_side(*[work] * 4)
    found = stats()
    assert (found.requests, found.failures, found.retries, found.bytes_avoided) == (6000, 0, 6000, 40_000)
    assert found.paths == {"direct": 4000, "inline": 2000}
    assert (before.requests, before.failures, before.retries, before.bytes_avoided, before.paths) == (0, 0, 0, 0, {})
    assert found.reasons == {"resize": "direct: nothing prevents it"}
    assert (found.slots_held, found.slots_idle, found.quarantined) == (1, 2, 3)
    assert (found.pool_bytes, found.pool_max_bytes, found.slot_waits) == (4, 5, 6)


URL: Final = "localhost:8001"
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


@pytest.mark.parametrize("is_aio", [False, True])
@pytest.mark.parametrize(
    ("path", "is_closed"), [("triton-shm", True), ("direct", False), ("triton-shm", False), ("inline", False)]
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


def test_the_warning_itself_is_of_that_line_if_there_is_anything_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(lambda: (ShmClient(URL), here())[1])
    assert [(each.filename, each.lineno) for each in told.warnings] == [(__file__, told.line)]
    assert [each.category for each in told.warnings] == [ResourceWarning]
    assert Told(lambda: (AsyncShmClient(URL), here())[1]).texts == [], "no task has used it"

    def refuse(*_: Any) -> None:
        raise ConnectionError

    def use() -> int:
        with pytest.raises(ConnectionError):
            ShmClient(URL)
        return 0

    monkeypatch.setattr(FakeTransport, "send", refuse)
    assert Told(use).texts == [], "its server does not answer"


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


@pytest.mark.parametrize("is_closed", [True, False])
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


@pytest.mark.parametrize("is_closed", [True, False])
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
        "from shm_backend_utils.process import Origin, Unclosed\n"
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
    assert ("the thing made at <string>:3 was not closed; close it" in done.stderr) is (advice != "ignore")


def origin_of(call: Coroutine[Any, Any, Any]) -> str:
    operation = inspect.getcoroutinelocals(call)["operation"]
    is_begun = inspect.isgenerator(operation)  # else it has its settings among its arguments
    settings = inspect.getgeneratorlocals(operation)["settings"] if is_begun else operation.args[1]
    origin = str(settings.origin)
    call.close()
    return origin


def test_the_line_of_an_async_call_is_named_before_it_runs_and_also_if_no_line_of_the_users_has_made_it() -> None:
    client = AsyncShmClient(URL)
    for what in ("infer", "prepare"):
        begin = getattr(client, what)
        line = here() + 1
        call = begin("model", {})
        assert origin_of(call) == f"{what} at {__file__}:{line}"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert str(thread.submit(Origin.here, "infer").result()).startswith(f"infer at {threading.__file__}:")
    call = gevent.spawn(client.infer, "model", {}).get()  # a greenlet's first frame is the function that it runs
    assert origin_of(call).startswith("infer at ")
    asyncio.run(client.close())


def test_the_line_is_that_of_the_instruction_wherever_in_a_function_it_is() -> None:
    first = here() + 1
    origins = [
        Origin.here("first"),
        *[Origin.here(f"{number}") for number in range(2)],
        Origin.here("last"),
    ]
    assert [origin.line - first for origin in origins] == [1, 2, 2, 3]
    assert str(origins[0]) == f"first at {__file__}:{first + 1}"
