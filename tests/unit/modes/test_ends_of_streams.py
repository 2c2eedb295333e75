"""The end of a stream whose generator fails in its end, too: nothing of the stream waits for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from shm_backend_utils.model.modes.stream import run_stream


class Stream:
    """As a StreamCall, whose client is gone."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self) -> None:
        raise OSError("the client is gone")


def answer(_: Any) -> Iterator[None]:
    try:
        yield
    finally:
        raise KeyError("of the model's own end")


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_generator_that_fails_in_its_end_keeps_nothing() -> None:
    watched: list[weakref.ref[Stream]] = []

    def serve() -> str:
        stream = Stream()
        watched.append(weakref.ref(stream))
        try:
            run_stream(stream, answer)  # type: ignore[arg-type]
        except KeyError as error:
            return str(error)
        return ""

    assert serve() == repr("of the model's own end")
    assert watched[0]() is None
