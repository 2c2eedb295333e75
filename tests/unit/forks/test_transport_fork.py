"""A client's connections, and device memory, in a forked child: it sends, cuts off and frees nothing.

The server of the connections is a process of its own and hears every byte.
"""

from __future__ import annotations

import itertools
import textwrap

import pytest

from tests.unit.forks.programs import run_program
from tests.unit.gpu.fakes import run_in_a_process

BEGIN = """
import asyncio, subprocess, threading, time
from shm_backend_utils.client import AsyncShmClient, ForkedError, ShmClient
from shm_backend_utils.errors import PeerError

serving = subprocess.Popen([sys.executable, "-m", "tests.unit.forks.serving", PROTOCOL],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
url = serving.stdout.readline().strip()
connections = 0

def heard(line=""):
    print(line, file=serving.stdin, flush=True)
    return serving.stdout.readline().split()

def unheard(work):
    before = heard()
    in_child(work)
    assert heard() == before, "the child has spoken on its parent's connection"

def answers(client):
    client._driver.run(client._core.check_server_answers(time.monotonic() + 10))

def held(client):
    client._driver.run(client._core.look_up("held", "", time.monotonic() + 30))

async def answers_async(client):
    driver, core = client._open()
    await driver.run(core.check_server_answers(time.monotonic() + 10))

async def held_async(client):
    driver, core = client._open()
    await driver.run(core.look_up("held", "", time.monotonic() + 30))

def outcome(call):
    try:
        call()
    except PeerError:  # the server's answer is no configuration, but it is an answer
        pass
    return "answered"
"""
CHECK = """
gc.collect()
before, connections = connections, int(heard()[0])
assert connections - before <= 2, "the parent had to connect again"
"""
END = """
serving.stdin.close()
serving.wait()
"""
PROGRAMS = {
    "that is idle, and closed there, or not": """
        client = ShmClient(url)
        def work():
            global client
            del client
        unheard(work)
        answers(client)
        unheard(client.close)
        answers(client)
        client.close()
    """,
    "on which another thread waits": """
        client = ShmClient(url)
        outcomes = []
        thread = threading.Thread(target=lambda: outcomes.append(outcome(lambda: held(client))))
        thread.start()
        def work():
            global client
            del client
        unheard(work)
        heard("go")
        thread.join()
        assert outcomes == ["answered"]
        client.close()
    """,
}
OVER_GRPC = {
    "of a client for registered models": """
        from shm_backend_utils.compat.triton_shm_client import TritonSHMClient
        client = TritonSHMClient(url.removeprefix("grpc://"))
        client.get_model_config("m")
        def refused():
            try:
                client.register_shm_model("m", [], [], 1, 1)
            except ForkedError:
                return
            os._exit(4)
        def work():
            global client
            refused()
            client.close()
            del client
        unheard(work)
        def drop():
            global client
            del client
        unheard(drop)
        client.get_model_config("m")
        client.close()
    """,
    "of a stream": """
        from shm_backend_utils.client.transports.grpc.codec import GrpcMessage
        from tritonclient.grpc import service_pb2
        client = ShmClient(url)
        message = GrpcMessage("ModelStreamInfer", service_pb2.ModelInferRequest(model_name="held"))
        stream = client._driver.transport.stream(message, 30)
        next(stream)
        def work():
            global client, stream
            del client, stream
        unheard(work)
        heard("go")
        assert len(list(stream)) == 1
        answers(client)
        client.close()
    """,
}
LAST = {  # where grpc.aio has a thread from then on
    "of an event loop in another thread": """
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        def run(awaited):
            return asyncio.run_coroutine_threadsafe(awaited, loop).result(20)
        client = AsyncShmClient(url)
        run(answers_async(client))
        waiting = asyncio.run_coroutine_threadsafe(held_async(client), loop)
        def work():
            global client, waiting
            del client, waiting
        unheard(work)
        run(answers_async(client))
        heard("go")
        assert outcome(lambda: waiting.result(20)) == "answered"
        run(client.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    """
}
IN_THE_LOOP = """
async def main():
    global client, waiting
    client = AsyncShmClient(url)
    await answers_async(client)
    waiting = asyncio.ensure_future(held_async(client))
    await asyncio.sleep(0.2)
    def work():
        global client, waiting
        del client, waiting
    unheard(work)
    await answers_async(client)
    heard("go")
    try:
        await asyncio.wait_for(waiting, 20)
    except PeerError:
        pass
    await client.close()

asyncio.run(main())
"""
NEW_IN_CHILD = """
async def answered():
    async with AsyncShmClient(url, timeout_s=20):
        pass

def work():
    asyncio.run(answered())
    answers(ShmClient(url, timeout_s=20))

loop = asyncio.new_event_loop()
client = AsyncShmClient(url)
loop.run_until_complete(answers_async(client))
in_child(work)
loop.run_until_complete(answers_async(client))
loop.run_until_complete(client.close())
in_child(work)
loop.close()
"""


@pytest.mark.parametrize(("protocol", "ending"), [("grpc", "sys.exit"), ("http", "os._exit"), ("http", "sys.exit")])
def test_connections(protocol: str, ending: str) -> None:
    """One process for all, whose start would take longest of each; an error ends with what it was at."""
    programs = PROGRAMS | (OVER_GRPC if protocol == "grpc" else {}) | LAST
    parts = [(f"print({what!r}, file=sys.stderr)", program, CHECK) for what, program in programs.items()]
    run_program(ending, f"PROTOCOL = {protocol!r}", BEGIN, *itertools.chain.from_iterable(parts), END)


def test_a_connection_of_the_event_loop_that_forks(protocol: str) -> None:
    """Such a child must not go on in the loop, which is Python's rule: it would take the parent's events."""
    run_program("os._exit", f"PROTOCOL = {protocol!r}", BEGIN, IN_THE_LOOP, CHECK, END)


def test_a_new_client_of_tasks_in_a_child(protocol: str) -> None:
    """That of gRPC is refused at once, as long as its parent's is open; all else works."""
    run_program("os._exit", f"PROTOCOL = {protocol!r}", BEGIN, NEW_IN_CHILD, END)


PRELUDE = """
import os, threading
from pathlib import Path
from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.memory.allocations import CudaAllocation
from shm_backend_utils.gpu.memory.bank import DeviceBank
from shm_backend_utils.gpu.memory.mappings import CudaMappings
from shm_backend_utils.gpu.ordering import OwnStreams
from shm_backend_utils.memory.descriptors import PRIVATE
from shm_backend_utils.memory.locks import use
from shm_backend_utils.memory.pool.slot import SlotRegion
from tests.unit.gpu.fakes import CLIENT, DRIVER, in_forked_child

gpu = DRIVER.runtime()
"""

SHARED = """
peer = DRIVER.runtime(CLIENT)
allocation = CudaAllocation(gpu, 1, 1)
mapping = CudaMappings(peer).map(allocation.handle, 1, 1, "memory", None)
streams = OwnStreams(peer)
streams.give_back(streams.borrow(1), 1)
"""

USES_OF_MEMORY = {
    "lets go of nothing that is its parent's": """
        def work():
            global mapping, streams, allocation
            mapping.close()
            allocation.free()
            del mapping, streams, allocation
            assert not peer.retired.is_waiting and not gpu.retired.is_waiting
        in_forked_child(work)
        assert DRIVER.live().opened == 1 and DRIVER.live().allocations == 1
    """,
    "does nothing that its parent has to do": """
        done = []
        gpu.retired.add(lambda: done.append("work"))
        def work():
            assert not gpu.retired.collect()
            assert done == []
        in_forked_child(work)
        while gpu.retired.collect():
            pass
        assert done == ["work"]
    """,
    "waits for no lock that its parent's other threads had": """
        held, go_on = threading.Event(), threading.Event()
        def hold():
            with gpu.retired._lock, gpu._lock:
                held.set()
                go_on.wait(20)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        def work():
            assert not gpu.retired.collect()
            try:
                with gpu.on(0):
                    raise AssertionError("CUDA works in a forked child")
            except CudaError as error:
                assert "was forked from one that uses CUDA" in str(error), error
        in_forked_child(work)
        go_on.set()
        thread.join()
    """,
}


@pytest.mark.parametrize("use", USES_OF_MEMORY)
def test_a_forked_child_of_one_that_shares_memory(use: str) -> None:
    run_in_a_process(PRELUDE + SHARED + textwrap.dedent(USES_OF_MEMORY[use]))


BANK = """
freeing, go_on = threading.Event(), threading.Event()
free = gpu.free

def free_slowly(address, device):
    freeing.set()
    go_on.wait(20)
    free(address, device)

def collect_all():
    while bank.collect():
        pass

gpu.free = free_slowly
bank = DeviceBank(CudaAccess(lambda: gpu), None)
regions = [SlotRegion(100, 1, 4096, PRIVATE) for _ in range(2)]
for region in regions:
    bank.provide(region, [0], [100])

inodes = {region: (Path("/dev/shm") / region.key).stat().st_ino for region in regions}

def descriptors(region):
    places = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(place.stat().st_ino == inodes[region] for place in places if place.exists())

try:
"""

END_OF_BANK = """
finally:
    go_on.set()
    for region in regions:
        region.destroy()
    bank.close()
"""

USES_OF_A_BANK = {
    "holds none of the regions that its parent has destroyed": """
        user = use(regions[0]._region.segment.fileno())
        regions[0].destroy()
        def work():
            assert descriptors(regions[0]) == 0
        in_forked_child(work)
        user.give_back()
    """,
    "ends although its parent was freeing memory": """
        for region in regions:
            region.destroy()
        collecting = threading.Thread(target=collect_all)
        collecting.start()
        assert freeing.wait(20)
        in_forked_child(lambda: None)
        go_on.set()
        collecting.join()
    """,
    "frees nothing": """
        go_on.set()
        regions[0].destroy()
        in_forked_child(bank.close)
        assert DRIVER.live().allocations == 2
        collect_all()
        assert DRIVER.live().allocations == 1
    """,
    "gives up nothing of its parent's when that was waiting for models": """
        go_on.set()
        user = use(regions[0]._region.segment.fileno())
        regions[0].destroy()
        bank.close()
        def work():
            assert not bank.collect()
            bank.abandon()
            assert not [thread for thread in threading.enumerate() if thread.name == "shm device memory"]
        in_forked_child(work)
        user.give_back()
        while DRIVER.live().allocations > 1:
            pass
    """,
}


@pytest.mark.parametrize("use", USES_OF_A_BANK)
def test_a_forked_child_of_one_that_has_a_bank(use: str) -> None:
    run_in_a_process(PRELUDE + BANK + textwrap.indent(textwrap.dedent(USES_OF_A_BANK[use]), "    ") + END_OF_BANK)
