"""What a client's objects do in a forked child: nothing to the parent's memory, and nothing to its server."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.forks.programs import run_program

# What every program begins with: a client, and `harmless`, which fails if a child wrote to shared memory, removed or
# unlocked any, or sent anything.
BEGIN = """
import asyncio, concurrent.futures, fcntl, hashlib, threading
from pathlib import Path
import numpy as np
from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import async_client_of, client_of
from shm_backend_utils.client import ForkedError, PoolOptions
from shm_backend_utils.memory.locks import is_owner_alive

X = np.arange(6, dtype=np.float32)
PARENT = os.getpid()

def compute(order, inputs):
    if order.model == "stream":
        return ({"OUT0": inputs["IN0"] * factor} for factor in range(6))
    return {"OUT0": inputs["IN0"] * 2}

def is_owned(path):
    fd = os.open(path, os.O_RDWR)
    try:
        return is_owner_alive(fd)
    finally:
        os.close(fd)

def memory():
    paths = sorted(Path("/dev/shm").glob(f"shmbu-{PARENT}-*"))
    return {path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), is_owned(path)) for path in paths}

def harmless(work):
    before, sent = memory(), len(server.orders)
    def watched():
        work()
        gc.collect()
        if len(server.orders) != sent:
            os._exit(3)
    in_child(watched)
    assert memory() == before, "the child has changed its parent's memory"
    assert all(owned for _, owned in before.values())

def refused(use):
    try:
        use()
    except ForkedError as error:
        assert "was forked from; make a new one in this process" in str(error)
        return
    os._exit(4)

def check_the_parents():
    for path in ("direct", "triton-shm", "inline"):
        with client.infer("m", {"IN0": X}, path=path) as result:
            assert result.path == path
            assert (result["OUT0"] == 2 * X).all()
    assert client.stats().slots_held == 0

streams = config("stream", model_transaction_policy={"decoupled": True})
server = FakeServer(config("m"), streams, compute=compute)
connected = client_of(server)
client = connected.__enter__()
"""
USED = """
client.infer("m", {"IN0": X}, path="direct").release()
client.infer("m", {"IN0": X}, path="triton-shm").release()
"""
CHECK = """
gc.collect()
check_the_parents()
"""
END = f"""
{CHECK}
connected.__exit__(None, None, None)
server.close()
"""

PROGRAMS = {
    "every entry of a client is refused": """
        lazy = client.stream("stream", {"IN0": X})
        def work():
            refused(lambda: client.infer("m", {"IN0": X}))
            refused(lambda: client.submit("m", {"IN0": X}))
            refused(lambda: client.prepare("m", {"IN0": ((6,), np.float32)}))
            refused(lambda: next(iter(client.stream("stream", {"IN0": X}))))
            refused(lambda: next(lazy))
            refused(lambda: client.explain("m"))
            refused(client.stats)
            refused(client.__enter__)
            client.close()
        harmless(work)
        lazy.close()
    """,
    "a client of asyncio is refused without its loop": """
        loop, entered = asyncio.new_event_loop(), async_client_of(server)
        mine = loop.run_until_complete(entered.__aenter__())
        harmless(lambda: refused(lambda: mine.infer("m", {"IN0": X}).send(None)))
        loop.run_until_complete(entered.__aexit__(None, None, None)); loop.close()
    """,
    "a client that dies there": """
        def work():
            global client, connected
            del client, connected
        harmless(work)
    """,
    "a prepared call is refused on every path": """
        calls = [client.prepare("m", {"IN0": ((6,), np.float32)}, path=path)
                 for path in ("direct", "triton-shm", "inline")]
        for call in calls:
            call.inputs["IN0"][:] = X
        calls[0].infer()  # the others are filled, and not sent yet
        def work():
            for call in calls:
                refused(call.infer)
                refused(lambda: call.inputs)
                call.close()
            calls.clear()
        harmless(work)
        for call in calls:
            assert (call.infer()["OUT0"] == 2 * X).all()
            call.close()
    """,
    "a prepared call that has grown, and another one that is in doubt, die there": """
        from shm_backend_utils.client.errors import deadline_exceeded
        calls = [client.prepare("m", {"IN0": ((6,), np.float32)}, outputs={"OUT0": 4}) for _ in range(2)]
        for call in calls:
            call.inputs["IN0"][:] = X
            assert [bool(call.infer().overflowed) for _ in range(2)] == [True, False]
        def lose(order):
            raise deadline_exceeded()
        server.before = lose
        try:
            calls[1].infer()
        except TimeoutError:
            pass
        server.before = lambda order: None
        def work():
            for call in calls:
                refused(call.infer)
            call = None
            calls.clear()
        harmless(work)
        for call in calls:
            assert (call.infer()["OUT0"] == 2 * X).all()
            call.close()
        call = None
    """,
    "a result dies there without harm": """
        results = [client.infer("m", {"IN0": X}, path=path) for path in ("direct", "triton-shm", "inline")]
        views = [result["OUT0"][2:4] for result in results]
        def work():
            for result, view in zip(results, views):
                assert (result["OUT0"] == 2 * X).all() and (view == 2 * X[2:4]).all()
                result.release()
            del result, view
            results.clear()
            views.clear()
        harmless(work)
        assert client.stats().slots_held == 1
        assert [view.tolist() for view in views] == [[4, 6]] * 3
        results.clear()
        views.clear()
    """,
    "frames of a stream die there and stay the parent's": """
        stream = client.stream("stream", {"IN0": X}, outputs={"OUT0": 24}, frames=3)
        frames = [next(stream), next(stream)]
        assert [frame.path for frame in frames] == ["direct"] * 2
        harmless(frames.clear)
        assert [float(frame["OUT0"][1]) for frame in frames] == [0.0, 1.0]
        frames.clear()
        assert [float(frame["OUT0"][1]) for frame in stream] == [2.0, 3.0, 4.0, 5.0]
    """,
    "a stream that was read in part does not go on there, and dies": """
        stream = client.stream("stream", {"IN0": X}, outputs={"OUT0": 24}, frames=3)
        next(stream)
        def work():
            global stream
            refused(lambda: next(stream))
            stream.close()
            del stream
        harmless(work)
        assert [float(frame["OUT0"][1]) for frame in stream] == [1.0, 2.0, 3.0, 4.0, 5.0]
    """,
    "futures of submitted calls are refused if they had no result yet": """
        go, arrived = threading.Event(), threading.Semaphore(0)
        ready = client.submit("m", {"IN0": X})
        concurrent.futures.wait([ready])
        server.before = lambda order: (arrived.release(), go.wait(30))
        futures = [client.submit("m", {"IN0": X}, path=path) for path in ("direct", "triton-shm", "inline")]
        for _ in futures:
            arrived.acquire()
        def work():
            assert (ready.result()["OUT0"] == 2 * X).all()
            for future in futures:
                refused(future.result)
                assert isinstance(future.exception(), ForkedError)
            assert concurrent.futures.wait(futures, timeout=30).not_done == set()
            futures.clear()
        harmless(work)
        server.before = lambda order: None
        go.set()
        assert all((future.result()["OUT0"] == 2 * X).all() for future in futures)
        del ready
        futures.clear()
    """,
    "a call that another thread has under way goes on in the parent": """
        go, arrived, results = threading.Event(), threading.Semaphore(0), []
        server.before = lambda order: (arrived.release(), go.wait(30))
        def infer(path):
            results.append(client.infer("m", {"IN0": X}, path=path)["OUT0"].copy())
        threads = [threading.Thread(target=infer, args=[path]) for path in ("direct", "triton-shm", "inline")]
        for thread in threads:
            thread.start()
            arrived.acquire()
        def work():
            global client, connected
            refused(lambda: client.infer("m", {"IN0": X}))
            del client, connected
        harmless(work)
        server.before = lambda order: None
        go.set()
        for thread in threads:
            thread.join()
        assert [result.tolist() for result in results] == [(2 * X).tolist()] * 3
    """,
    "locks that other threads hold at that moment keep nobody waiting": """
        stream = client.stream("stream", {"IN0": X}, outputs={"OUT0": 24}, frames=3)
        frame = next(stream)
        core = client._core
        def work():
            global stream, frame
            refused(lambda: next(stream))
            refused(client.stats)
            client.close()
            del stream, frame
        with core.tally.lock, client._memory.pool._lock, client._memory.bank._lock:
            harmless(work)
        del frame
        assert sum(1 for _ in stream) == 5
    """,
    "memory that a closed client's arrays hold": """
        result = client.infer("m", {"IN0": X})
        array = result["OUT0"]
        result.release()
        connected.__exit__(None, None, None)
        def work():
            global array
            assert (array == 2 * X).all()
            del array
        harmless(work)
        assert (array == 2 * X).all()
        connected = client_of(server)
        client = connected.__enter__()
    """,
}
UNUSED = {
    "a client that was never used": """
        def work():
            global client, connected
            refused(lambda: client.infer("m", {"IN0": X}))
            del client, connected
        harmless(work)
    """,
    "a client that is just trying whether memory is shared": """
        go, arrived = threading.Event(), threading.Event()
        register = server.register
        def held(*order):
            arrived.set()
            go.wait(30)
            register(*order)
        server.register = held
        thread = threading.Thread(target=lambda: client.infer("m", {"IN0": X}).release())
        thread.start()
        arrived.wait(30)
        def work():
            global client, connected
            del client, connected
        harmless(work)
        server.register = register
        go.set()
        thread.join()
    """,
}


def test_in_a_forked_child() -> None:
    """One process for all, whose start would take longest of each; an error ends with what it was at."""
    parts = [(f"print({what!r}, file=sys.stderr)", program, CHECK) for what, program in PROGRAMS.items()]
    run_program("sys.exit", BEGIN, USED, *itertools.chain.from_iterable(parts), END)


@pytest.mark.parametrize("program", UNUSED.values(), ids=list(UNUSED))
def test_in_a_child_that_was_forked_before_the_first_call(program: str) -> None:
    run_program("sys.exit", BEGIN, program, END)


@pytest.mark.parametrize("ending", ["os._exit", "multiprocessing"])
def test_in_a_child_that_ends_otherwise(ending: str) -> None:
    run_program(ending, BEGIN, USED, PROGRAMS["a client that dies there"], END)
