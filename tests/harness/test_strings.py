"""Strings: on the direct path they lie in shared memory like everything else; on every path they are the same."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import TensorError, TensorTypeError
from tests.e2e.eventually import all_memory_comes_back
from tests.e2e.flavours import AnyClient

MODELS = ("word_games", "words")

TEXT: Final = [["a", "bcd", ""], ["ü", "日本語", "ends with nothing\0"]]
WORDS: Final = np.array([[word.encode() for word in row] for row in TEXT], object)
LOUD: Final = [[word.upper() for word in row] for row in WORDS]


@pytest.mark.parametrize(
    "words",
    [[[b"\xff\x00\xfe", b"\0", b"\0\0\0\0"]], [[b"", b""], [b"", b""]], [[b"x" * 10**6]], [[b"w"] * 10_000]],
    ids=["no text", "empty", "long", "many"],
)
def test_any_bytes_come_back_as_they_went(client: AnyClient, path: PathName, words: Any) -> None:
    with client.infer("words", {"WORDS": words}, path=path, outputs=["SAME"]) as result:
        assert result["SAME"].tolist() == words


FITTING: Final = (1000, ((2, 3), "S20"), ((2, 3), "U20"), ((6,), object))


@pytest.mark.parametrize("hint", [*FITTING, 0, 10, ((2, 3), "S1"), None], ids=str)
def test_a_hint_gives_strings_room_and_one_that_is_too_small_does_not_matter(
    client: AnyClient, path: PathName, hint: Any
) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}, path=path) as result:
        assert bool(result.overflowed) == (path == "direct" and hint not in FITTING)
        assert result["LOUD"].tolist() == LOUD


def test_strings_of_a_result_hold_no_shared_memory(client: AnyClient) -> None:
    outputs = {"LOUD": 1000, "SAME": None}
    result = client.infer("words", {"WORDS": WORDS}, outputs=outputs)
    all_memory_comes_back(client)
    client.infer("words", {"WORDS": [["something else", "of other lengths"]]}, outputs=outputs).release()
    assert (result["LOUD"].tolist(), result["SAME"].tolist()) == (LOUD, WORDS.tolist())


@pytest.mark.parametrize("dtype", ["S20", "U20", object], ids=str)
def test_a_prepared_call_takes_other_strings_each_time(client: AnyClient, path: PathName, dtype: Any) -> None:
    found = []
    with client.prepare("words", {"WORDS": ((1, 2), dtype)}, outputs=["LOUD", "SAME"], path=path) as call:
        for given in (["a", "bc"], [b"a longer one", ""], ["ü", b"\0"]):
            call.inputs["WORDS"][0] = given
            with call.infer() as result:
                found.append([result["LOUD"], result["SAME"]])
    expected = [[b"a", b"bc"], [b"a longer one", b""], ["ü".encode(), b"\0"]]
    assert [same.tolist() for _, same in found] == [[words] for words in expected]
    assert [loud.tolist() for loud, _ in found] == [[[word.upper() for word in words]] for words in expected]


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


PLAYED_WORDS: Final = [b"one", b"\0", b"", "ü".encode(), b"ends with nothing\0"]
ANSWERS: Final[dict[str, list[bytes]]] = {
    "list": ["ü".encode(), b"", b"bc"],
    "all but the first": PLAYED_WORDS[1:],
    "the strings themselves": PLAYED_WORDS,
    "the array": PLAYED_WORDS,
}


@pytest.mark.parametrize("game", ANSWERS)
def test_a_model_may_give_strings_in_any_form(client: AnyClient, path: PathName, game: str) -> None:
    named: dict[str, Any] = {"outputs": {"Y": 1000}, "parameters": {"game": game}, "path": path}
    with client.infer("word_games", {"WORDS": PLAYED_WORDS}, **named) as result:
        assert result.overflowed == {}
        assert (result["Y"].dtype, result["Y"].tolist()) == (np.dtype(object), ANSWERS[game])
