"""Others' errors, told as this library's: which, how, and that nothing then waits for the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shm_backend_utils.telling import telling


class OthersError(Exception):
    pass


class OwnError(Exception):
    pass


class Memory:
    pass


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def own(error: OthersError) -> OwnError:
    return OwnError(f"it is {error}")


def raise_others(text: str) -> None:
    raise OthersError(text)


def test_an_error_is_told() -> None:
    with pytest.raises(OwnError, match="it is late") as caught, telling(OthersError, own):
        raise_others("late")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert isinstance(caught.value.__context__, OthersError)


def test_what_means_nothing_else_is_raised_itself() -> None:
    error = OthersError("x")
    with pytest.raises(OthersError) as caught, telling(OthersError, lambda _: None):
        raise error
    assert caught.value is error


def test_errors_of_other_kinds_are_left_alone() -> None:
    with pytest.raises(KeyError), telling((OthersError, OSError), lambda error: OwnError(str(error))):
        raise KeyError("x")


def test_without_an_error_nothing_is_asked() -> None:
    with telling(OthersError, own):
        pass


def test_a_function_is_told_of_as_well_each_time() -> None:
    told = telling(OthersError, own)(raise_others)
    for text in ("early", "late"):
        with pytest.raises(OwnError, match=f"it is {text}"):
            told(text)


def test_what_the_frames_had_in_hand_goes_with_the_error() -> None:
    """From Python 3.12 on, it would not, if a generator had told it."""
    gone: list[weakref.ref[Memory]] = []

    def map_it() -> None:
        memory = Memory()
        gone.append(weakref.ref(memory))
        with telling(OthersError, own):
            raise_others("refused")

    def serve() -> str:
        memory = Memory()
        gone.append(weakref.ref(memory))
        try:
            map_it()
        except OwnError as error:
            return str(error)
        return ""

    assert serve() == "it is refused"
    assert [each() for each in gone] == [None, None]
