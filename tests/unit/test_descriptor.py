"""An open file descriptor belongs to an object, which no interrupt takes it from."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from shm_backend_utils.memory.descriptors import Descriptor


def count_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_open(number: int) -> bool:
    return Path(f"/proc/self/fd/{number}").is_symlink()


def test_it_is_open_until_it_is_closed() -> None:
    descriptor = Descriptor(os.open, "/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    number = descriptor.fileno()
    assert Path(f"/proc/self/fd/{number}").readlink() == Path("/dev/null")
    descriptor.close()
    assert not is_open(number)
    assert descriptor.fileno() == -1


def test_closing_twice_closes_nobody_elses() -> None:
    descriptor = Descriptor(os.dup, 0)
    number = descriptor.fileno()
    descriptor.close()
    again = os.dup(0)
    assert again == number
    descriptor.close()
    del descriptor
    assert is_open(again)
    os.close(again)


def test_it_is_closed_with_its_object() -> None:
    number = Descriptor(os.dup, 0).fileno()
    assert not is_open(number)


def test_it_is_open_without_its_object_where_it_is_to_be() -> None:
    descriptor = Descriptor(os.dup, 0)
    descriptor.outlive_object()
    number = descriptor.fileno()
    del descriptor
    assert is_open(number)
    os.close(number)


def test_it_can_be_closed_also_where_it_would_outlive_its_object() -> None:
    descriptor = Descriptor(os.dup, 0)
    descriptor.outlive_object()
    number = descriptor.fileno()
    descriptor.close()
    assert not is_open(number)


def test_what_cannot_be_opened_is_the_error_of_the_call() -> None:
    with pytest.raises(FileNotFoundError):
        Descriptor(os.open, "/nowhere", os.O_RDONLY)


class Interrupt(BaseException):
    """Of a signal's handler."""


def test_no_interrupt_leaves_one_open() -> None:
    mine = {test_no_interrupt_leaves_one_open.__code__, Descriptor.__init__.__code__, Descriptor.close.__code__}

    def handle(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code in mine:  # what a finalizer raises, nobody would see
            raise Interrupt

    before = count_open()
    stopped = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not stopped.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(1e-5)

    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    thread = threading.Thread(target=interrupt)
    thread.start()
    interrupted = 0
    try:
        signal.signal(signal.SIGUSR1, handle)
        while interrupted < 500:
            try:
                descriptor = Descriptor(os.dup, 0)
                descriptor.close()
                del descriptor
            except Interrupt:
                interrupted += 1
    except Interrupt:
        interrupted += 1
    finally:
        while True:  # an interrupt may come in here, too
            try:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                break
            except Interrupt:
                continue
        stopped.set()
        thread.join()
        signal.signal(signal.SIGUSR1, old)
    assert interrupted
    assert count_open() == before
