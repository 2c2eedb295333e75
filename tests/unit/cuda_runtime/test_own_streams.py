"""Streams of our own: nobody else has one that is borrowed, and they go with what made them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from shm_backend_utils.memory.cuda.ordering import OwnStreams
from shm_backend_utils.memory.cuda.runtime import CudaRuntime
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver, LiveCounts
from tests.unit.gpus import NOTHING, PATIENCE_S, collect_all, switching_often


def test_a_stream_is_borrowed_again_and_of_its_device(driver: FakeDriver, gpu: CudaRuntime) -> None:
    streams = OwnStreams(gpu)
    for device in (0, 1):
        first = streams.borrow(device)
        second = streams.borrow(device)
        assert first != second
        assert gpu.stream_device(first, 0) == gpu.stream_device(second, 0) == device
        streams.give_back(first, device)
        with streams.one(device) as again:
            assert again == first
            assert int(driver.bindings().cuCtxGetDevice()[1]) == device
        streams.give_back(second, device)
    assert driver.live() == LiveCounts(streams=4)


def test_a_stream_is_given_back_after_an_error(driver: FakeDriver, gpu: CudaRuntime) -> None:
    streams = OwnStreams(gpu)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), streams.one(1):
            print(1 / 0)
    assert driver.live() == LiveCounts(streams=1)


def test_streams_go_with_what_made_them_and_what_is_on_them_is_done(driver: FakeDriver, gpu: CudaRuntime) -> None:
    streams = OwnStreams(gpu)
    finish, done = threading.Event(), threading.Event()

    def work() -> None:
        finish.wait(PATIENCE_S)
        done.set()

    with streams.one(1) as stream:
        driver.launch(stream, work)
    del streams
    assert driver.live().streams == 1, "a finalizer asks nothing of CUDA"
    collect_all(gpu)
    assert driver.live() == NOTHING
    finish.set()
    assert done.wait(PATIENCE_S)


def test_no_two_threads_have_one_stream(driver: FakeDriver, gpu: CudaRuntime) -> None:
    streams, threads, turns = OwnStreams(gpu), 8, 200
    in_use: Counter[int] = Counter()
    found: list[str] = []
    begin = threading.Barrier(threads)

    def use() -> None:
        begin.wait()
        for turn in range(turns):
            with streams.one(turn % 2) as stream:
                in_use[stream] += 1
                if in_use[stream] != 1:
                    found.append(f"{stream:#x} is used twice")
                if gpu.stream_device(stream, 0) != turn % 2:
                    found.append(f"{stream:#x} is of the other device")
                in_use[stream] -= 1

    workers = [threading.Thread(target=use) for _ in range(threads)]
    with switching_often():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE_S)
    assert found == []
    assert driver.live().streams <= 2 * threads
