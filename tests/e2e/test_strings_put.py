"""What a model may give as an output of strings, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import InferenceError, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer

from .in_band import EVERY_PATH_OF_STRINGS

every_path = pytest.mark.parametrize("path", EVERY_PATH_OF_STRINGS)

WORDS: Final = [b"one", b"\0", b"", "ü".encode(), b"ends with nothing\0"]
ANSWERS: Final[dict[str, list[bytes]]] = {
    "list": ["ü".encode(), b"", b"bc"],
    "list of bytes": [b"\xff", b"ends with nothing\0", b""],
    "list of both": ["ü".encode(), b"\xff", b"\0"],
    "array of text": ["ü".encode(), b"bc"],
    "array of bytes": [b"\xff", b"bc"],
    "array of objects": ["ü".encode(), b"\xff\0"],
    "array in another order": [b"d", b"b"],
    "nothing": [],
    "array of nothing": [],
    "all but the first": WORDS[1:],
    "the strings themselves": WORDS,
    "the array": WORDS,
}
FAULTS: Final = {
    "a number": "an element of type int; expected str or bytes",
    "a number among objects": "an element of type int; expected str or bytes",
    "numbers": "'Y' is FP64, but the model's configuration says TYPE_STRING",
    "a list among objects": "an element of type list; expected str or bytes",
    "text that has no UTF-8": "'Y'",
    "two dimensions": "'Y' has shape [1, 2], but the model's configuration says [-1]",
    "memory": "output 'Y' holds strings, of which nobody knows the size yet; use call.put()",
}


@pytest.fixture
def client(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    """A client of one protocol: what a model gives does not depend on it."""
    with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
        yield client


def play(client: ShmClient, game: str, **named: Any) -> npt.NDArray[Any]:
    """Return what the model gives in this game."""
    hint = named.pop("hint", None)
    with client.infer(
        "word_games", {"WORDS": WORDS}, outputs={"Y": hint}, parameters={"game": game}, **named
    ) as result:
        assert bool(result.overflowed) is (hint == 0)
        return result["Y"]


@every_path
@pytest.mark.parametrize("game", ANSWERS)
def test_a_model_may_give_strings_in_any_form(client: ShmClient, path: PathName, game: str) -> None:
    found = play(client, game, path=path, hint=1000)
    assert (found.dtype, found.tolist()) == (np.dtype(object), ANSWERS[game])


@pytest.mark.parametrize("game", ["list", "array of text", "array of objects", "all but the first", "the array"])
def test_strings_of_any_form_come_back_in_the_response_if_they_find_no_room(client: ShmClient, game: str) -> None:
    assert play(client, game, hint=0).tolist() == ANSWERS[game]


def test_strings_that_are_an_inputs_need_no_room(client: ShmClient) -> None:
    game = {"game": "the strings themselves"}
    with client.infer("word_games", {"WORDS": WORDS}, outputs={"Y": 0}, parameters=game) as result:
        assert (result["Y"].tolist(), result.overflowed) == (WORDS, {})


@every_path
@pytest.mark.parametrize("game", FAULTS)
def test_what_is_no_strings_is_the_models_fault_and_the_next_request_is_served(
    client: ShmClient, path: PathName, game: str
) -> None:
    with pytest.raises(InferenceError) as failure:
        play(client, game, path=path)
    assert FAULTS[game] in failure.value.message()
    assert failure.value.status() == "StatusCode.INTERNAL"
    assert play(client, "list", path=path, hint=1000).tolist() == ANSWERS["list"]


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="with NumPy 1, the stub of Triton 2.51 takes strings"
)
@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_strings_that_the_stub_cannot_take_are_an_error_that_tells_the_way_out(
    client: ShmClient, path: PathName
) -> None:
    with pytest.raises(InferenceError, match="install numpy<2 or a newer Triton; the direct path is not affected"):
        client.infer("word_games", {}, outputs=["Y"], parameters={"game": "list"}, path=path)


@every_path
def test_a_model_that_gets_no_strings_names_the_input(client: ShmClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="the request has no input 'WORDS'"):
        client.infer("word_games", {}, outputs=["Y"], parameters={"game": "the array"}, path=path)
