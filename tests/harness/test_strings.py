"""Strings: on the direct path they lie in shared memory like everything else; on every path they are the same."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import TensorError, TensorTypeError
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient

MODELS = ("identity", "word_games", "words")

TEXT: Final = [["a", "bcd", ""], ["ü", "日本語", "ends with nothing\0"]]
WORDS: Final = np.array([[word.encode() for word in row] for row in TEXT], object)
LOUD: Final = [[word.upper() for word in row] for row in WORDS]


def infer(client: AnyClient, words: Any = WORDS, **named: Any) -> dict[str, npt.NDArray[Any]]:
    with client.infer("words", {"WORDS": words}, **named) as result:
        return dict(result)


@pytest.mark.parametrize(
    "words",
    [[[b"\xff\x00\xfe", b"\0", b"\0\0\0\0"]], [[b"", b""], [b"", b""]], [[b"x" * 10**6]], [[b"w"] * 10_000]],
    ids=["no text", "empty", "long", "many"],
)
def test_any_bytes_come_back_as_they_went(client: AnyClient, path: PathName, words: Any) -> None:
    assert infer(client, words, path=path, outputs=["SAME"])["SAME"].tolist() == words


def test_strings_that_found_no_room_come_back_in_the_same_response_and_have_room_the_next_time(
    client: AnyClient,
) -> None:
    for words in (WORDS, np.repeat(WORDS, 10, axis=1)):
        encoded_size = sum(4 + len(word) for word in words.flat)
        for overflowed in ({"LOUD": encoded_size}, {}):
            with client.infer("words", {"WORDS": words}, outputs=["LOUD", "SAME"]) as result:
                assert result.overflowed == overflowed
                assert result["LOUD"].tolist() == [[word.upper() for word in row] for row in words]
                assert result["SAME"].tolist() == words.tolist()


@pytest.mark.parametrize("hint", [1000, ((2, 3), "S20"), ((2, 3), "U20"), ((6,), object)], ids=str)
def test_a_hint_gives_strings_room(client: AnyClient, path: PathName, hint: Any) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}, path=path) as result:
        assert result.overflowed == {}
        assert result["LOUD"].tolist() == LOUD


@pytest.mark.parametrize("hint", [0, 10, ((2, 3), "S1"), None], ids=str)
def test_a_hint_that_is_too_small_does_not_matter(client: AnyClient, path: PathName, hint: Any) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}, path=path) as result:
        assert bool(result.overflowed) == (path == "direct")
        assert result["LOUD"].tolist() == LOUD


def test_strings_of_a_result_hold_no_shared_memory(client: AnyClient) -> None:
    result = client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": 1000, "SAME": None})
    all_memory_comes_back(client)
    infer(client, [["something else", "of other lengths"]], outputs={"LOUD": 1000})
    assert (result["LOUD"].tolist(), result["SAME"].tolist()) == (LOUD, WORDS.tolist())


every_dtype = pytest.mark.parametrize("dtype", ["S20", "U20", object], ids=str)


@every_dtype
def test_a_prepared_call_takes_other_strings_each_time(client: AnyClient, path: PathName, dtype: Any) -> None:
    with client.prepare("words", {"WORDS": ((1, 2), dtype)}, outputs=["LOUD", "SAME"], path=path) as call:
        words = call.inputs["WORDS"]
        for given, expected in (
            (["a", "bc"], [b"a", b"bc"]),
            ([b"a longer one", ""], [b"a longer one", b""]),
            (["ü", b"\0"], ["ü".encode(), b"\0"]),
        ):
            words[0] = given
            with call.infer() as result:
                assert result["LOUD"].tolist() == [[word.upper() for word in expected]]
                assert result["SAME"].tolist() == [expected]


def test_strings_that_outgrow_their_room_are_an_error_that_tells_the_remedy(client: AnyClient) -> None:
    with client.prepare("words", {"WORDS": ((1, 2), "S20")}, outputs=["SAME"]) as call:
        call.inputs["WORDS"][0] = ["x" * 41, ""]
        with pytest.raises(
            TensorError,
            match=r"input 'WORDS' take 49 bytes, but the call was prepared for 48; describe them as \(shape, 'S100'\)",
        ) as error:
            call.infer()
        assert error.value.tensor == "WORDS"
        call.inputs["WORDS"][0] = ["x" * 40, ""]  # their room is for all of them together
        assert call.infer()["SAME"].tolist() == [[b"x" * 40, b""]]


@pytest.mark.parametrize("element", [1, None, 2.5], ids=str)
def test_what_is_no_string_is_refused_by_the_inputs_name(client: AnyClient, path: PathName, element: Any) -> None:
    with client.prepare("words", {"WORDS": ((1, 2), "S20")}, outputs=["SAME"], path=path) as call:
        call.inputs["WORDS"][0] = ["a", element]
        with pytest.raises(TensorTypeError, match="'WORDS'"):
            call.infer()
        call.inputs["WORDS"][0] = ["a", "b"]
        assert call.infer()["SAME"].tolist() == [[b"a", b"b"]]


def test_strings_of_the_last_result_stay_when_the_call_is_made_again(client: AnyClient, path: PathName) -> None:
    with client.prepare("words", {"WORDS": ((1, 1), "S20")}, outputs={"LOUD": 100}, path=path) as call:
        call.inputs["WORDS"][:] = "first"
        first = call.infer()["LOUD"]
        call.inputs["WORDS"][:] = "second"
        assert (call.infer()["LOUD"].item(), first.item()) == (b"SECOND", b"FIRST")


PLAYED_WORDS: Final = [b"one", b"\0", b"", "ü".encode(), b"ends with nothing\0"]
ANSWERS: Final[dict[str, list[bytes]]] = {
    "list": ["ü".encode(), b"", b"bc"],
    "all but the first": PLAYED_WORDS[1:],
    "the strings themselves": PLAYED_WORDS,
    "the array": PLAYED_WORDS,
}


@pytest.mark.parametrize("game", ANSWERS)
def test_a_model_may_give_strings_in_any_form(client: AnyClient, path: PathName, game: str) -> None:
    with client.infer(
        "word_games", {"WORDS": PLAYED_WORDS}, outputs={"Y": 1000}, parameters={"game": game}, path=path
    ) as result:
        assert result.overflowed == {}
        assert (result["Y"].dtype, result["Y"].tolist()) == (np.dtype(object), ANSWERS[game])
