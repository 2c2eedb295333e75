"""Forks of a client's process at every state of a call, against the real server: the parent goes on as if nothing was.

What a child may do to memory, tests/unit/forks looks at byte by byte. Each test is a program of its own.
"""

from __future__ import annotations

import pytest

from shm_backend_utils.server import EmbeddedServer
from tests.unit.forks.programs import ENDINGS, run_program

BEGIN = """
import concurrent.futures, threading
import numpy as np
from shm_backend_utils.client import ForkedError, ShmClient

PATHS = ("direct", "triton-shm", "inline")
X = np.arange(1000, dtype=np.float32)
client = ShmClient(URL)

def refused(use):
    try:
        use()
    except ForkedError:
        return
    os._exit(4)

def check():
    for path in PATHS:
        with client.infer("identity", {"INPUT0": X}, path=path) as result:
            assert result.path == path
            assert (result["OUTPUT0"] == X).all()
"""
END = """
check()
gc.collect()
stats = client.stats()
assert (stats.slots_held, stats.quarantined, stats.retries, stats.failures) == (0, 0, 0, 0), stats
client.close()
"""
PROGRAMS = {
    "before the first call": """
        def work():
            global client
            refused(check)
            del client
        in_child(work)
    """,
    "with results held": """
        check()
        results = [client.infer("identity", {"INPUT0": X}, path=path) for path in PATHS]
        views = [result["OUTPUT0"][::2] for result in results]
        def work():
            global client
            results.clear()
            views.clear()
            del client
        in_child(work)
        assert all((result["OUTPUT0"] == X).all() for result in results)
        check()
        assert all((view == X[::2]).all() for view in views)
        results.clear()
        views.clear()
    """,
    "with prepared calls": """
        shape = {"INPUT0": (X.shape, np.float32)}
        calls = [client.prepare("identity", shape, path=path) for path in PATHS]
        for call in calls:
            call.inputs["INPUT0"][:] = X
        def work():
            for call in calls:
                refused(call.infer)
                call.close()
            calls.clear()
        for _ in range(2):
            in_child(work)
            for call in calls:
                assert (call.infer()["OUTPUT0"] == X).all()
        for call in calls:
            call.close()
        calls.clear()
        del call
    """,
    "with calls under way in other threads": """
        check()
        SLOW = {"VALUE_AND_DELAY_US": np.array([7, 500_000], np.int64)}
        client.infer("late_writer", SLOW).release()
        futures = [client.submit("late_writer", SLOW) for _ in range(2)]
        def work():
            global client
            for future in futures:
                refused(future.result)
            futures.clear()
            del client
        in_child(work)
        assert all((future.result()["VALUES"] == 7).all() for future in futures)
        futures.clear()
    """,
    "with a stream that was read in part": """
        image = np.random.default_rng(0).integers(0, 256, (3 * 256, 3 * 256, 3), np.uint8)
        tiles = [image[256 * (n // 3):, 256 * (n % 3):][:256, :256].copy() for n in range(9)]
        stream = client.stream("frames", {"IMAGE": image}, outputs={"TILE": tiles[0].nbytes, "PLACE": 8}, frames=3)
        frames = [next(stream), next(stream)]
        def work():
            global stream
            refused(lambda: next(stream))
            frames.clear()
            del stream
        in_child(work)
        assert [frame.path for frame in frames] == ["direct"] * 2
        seen = [frame["TILE"].copy() for frame in frames]
        frames.clear()
        seen += [frame["TILE"].copy() for frame in stream]
        assert all(np.array_equal(*pair) for pair in zip(seen, tiles, strict=True))
        del stream
    """,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_fork(triton_server: EmbeddedServer, program: str, ending: str) -> None:
    run_program(ending, f"URL = {triton_server.grpc_url!r}", BEGIN, program, END)


def test_a_child_of_multiprocessing(triton_server: EmbeddedServer) -> None:
    run_program("multiprocessing", f"URL = {triton_server.grpc_url!r}", BEGIN, PROGRAMS["with results held"], END)
