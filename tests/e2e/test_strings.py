"""Strings: on the direct path they lie in shared memory like everything else; on every path they are the same."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import TensorError, TensorTypeError

from .eventually import all_memory_comes_back
from .flavours import AnyClient, Flavour
from .in_band import EVERY_PATH_OF_STRINGS, strings_in_band
from .own_regions import lose, own_regions
from .wiretap import tapped

every_path = pytest.mark.parametrize("path", EVERY_PATH_OF_STRINGS)

TEXT: Final = [["a", "bcd", ""], ["ü", "日本語", "ends with nothing\0"]]
WORDS: Final = np.array([[word.encode() for word in row] for row in TEXT], object)
LOUD: Final = [[word.upper() for word in row] for row in WORDS]
LENGTHS: Final = [[len(word) for word in row] for row in WORDS]

KINDS: Final[dict[str, Any]] = {
    "lists of text": TEXT,
    "lists of bytes": WORDS.tolist(),
    "lists of both": [TEXT[0], list(WORDS[1])],
    "array of objects": WORDS,
    "array of text": np.array(TEXT, object),
    "Fortran order": np.asfortranarray(WORDS),
    "transposed": WORDS.T.copy().T,
    "reversed": WORDS[::-1].copy()[::-1],
    "list of rows": list(WORDS),
}


def infer(client: AnyClient, words: Any = WORDS, **named: Any) -> dict[str, npt.NDArray[Any]]:
    with client.infer("words", {"WORDS": words}, **named) as result:
        return dict(result)


@every_path
def test_strings_go_and_come(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("words", {"WORDS": TEXT}, path=path) as result:
        assert result.path == path
        assert result["LOUD"].tolist() == LOUD
        assert result["LENGTHS"].tolist() == LENGTHS
        assert result["SAME"].tolist() == WORDS.tolist()
        assert result["SAME"].dtype == object


@every_path
@pytest.mark.parametrize("kind", KINDS)
def test_strings_are_the_same_whatever_held_them(client: ShmClient, path: PathName, kind: str) -> None:
    assert infer(client, KINDS[kind], path=path, outputs=["LOUD"])["LOUD"].tolist() == LOUD


@every_path
@pytest.mark.parametrize("array", [np.array([["a", "bc"]]), np.array([[b"a", b"bc"]]), np.array([["a", "bc"]], ">U2")])
def test_strings_of_numpys_own_dtypes(client: ShmClient, path: PathName, array: npt.NDArray[Any]) -> None:
    assert infer(client, array, path=path)["LOUD"].tolist() == [[b"A", b"BC"]]


@every_path
@pytest.mark.parametrize(
    "words",
    [[[b"\xff\x00\xfe", b"\0", b"\0\0\0\0"]], [[b"", b""], [b"", b""]], [[b"x" * 10**6]], [[b"w"] * 10_000]],
    ids=["no text", "empty", "long", "many"],
)
def test_any_bytes_come_back_as_they_went(client: ShmClient, path: PathName, words: Any) -> None:
    assert infer(client, words, path=path, outputs=["SAME"])["SAME"].tolist() == words


@every_path
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_no_strings_at_all(client: ShmClient, path: PathName, shape: tuple[int, int]) -> None:
    found = infer(client, np.empty(shape, object), path=path)
    assert [(name, array.shape) for name, array in found.items()] == [(name, shape) for name in found]


def test_the_request_carries_no_strings_and_neither_does_its_answer(flavour: Flavour) -> None:
    word = b"needle in a haystack"
    with tapped(flavour.url.removeprefix("http://")) as wiretap:
        url = f"http://{wiretap.address}" if not flavour.has_streams else wiretap.address
        with Flavour(url, flavour.is_aio).client() as client:
            first = client.infer("words", {"WORDS": [[word]]}, outputs={"LOUD": 64, "SAME": None})
            assert (first["LOUD"].item(), first["SAME"].item()) == (word.upper(), word)
            assert (first.overflowed, first.bytes_avoided) == ({}, 3 * 24)  # each string with its length
        assert word not in wiretap.sent


@strings_in_band
@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_strings_that_a_request_carried_were_not_avoided(client: ShmClient, path: PathName) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs=["LOUD"], path=path) as result:
        assert result.bytes_avoided == 0


def test_strings_that_found_no_room_come_back_in_the_same_response_and_have_room_the_next_time(
    any_client: AnyClient,
) -> None:
    for words in (WORDS, np.repeat(WORDS, 10, axis=1)):
        encoded_size = sum(4 + len(word) for word in words.flat)
        for overflowed in ({"LOUD": encoded_size}, {}):
            with any_client.infer("words", {"WORDS": words}, outputs=["LOUD", "SAME"]) as result:
                assert result.overflowed == overflowed
                assert result["LOUD"].tolist() == [[word.upper() for word in row] for row in words]
                assert result["SAME"].tolist() == words.tolist()


@every_path
@pytest.mark.parametrize("hint", [1000, ((2, 3), "S20"), ((2, 3), "U20"), ((6,), object)], ids=str)
def test_a_hint_gives_strings_room(client: ShmClient, path: PathName, hint: Any) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}, path=path) as result:
        assert result.overflowed == {}
        assert result["LOUD"].tolist() == LOUD


@every_path
@pytest.mark.parametrize("hint", [0, 10, ((2, 3), "S1"), None], ids=str)
def test_a_hint_that_is_too_small_does_not_matter(client: ShmClient, path: PathName, hint: Any) -> None:
    with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}, path=path) as result:
        assert bool(result.overflowed) == (path == "direct")
        assert result["LOUD"].tolist() == LOUD


def test_room_that_is_exactly_enough_is_enough(client: ShmClient) -> None:
    size = sum(4 + len(word) for word in WORDS.flat)
    for hint, overflowed in ((size, {}), (size - 1, {"LOUD": size})):
        with client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": hint}) as result:
            assert result.overflowed == overflowed
            assert result["LOUD"].tolist() == LOUD


def test_strings_of_a_result_hold_no_shared_memory(any_client: AnyClient) -> None:
    result = any_client.infer("words", {"WORDS": WORDS}, outputs={"LOUD": 1000, "SAME": None})
    all_memory_comes_back(any_client)
    infer(any_client, [["something else", "of other lengths"]], outputs={"LOUD": 1000})
    assert (result["LOUD"].tolist(), result["SAME"].tolist()) == (LOUD, WORDS.tolist())


@every_path
def test_calls_that_run_together_do_not_mix_their_strings(any_client: AnyClient, path: PathName) -> None:
    words = [[[b"%d" % (10**number)]] for number in range(20)]
    tasks = [any_client.submit("words", {"WORDS": one}, outputs=["LOUD"], path=path) for one in words]
    assert [task.result()["LOUD"].tolist() for task in tasks] == words


@every_path
def test_more_strings_than_are_copied_in_passing(any_client: AnyClient, path: PathName) -> None:
    word = b"x" * (5 << 20)
    assert infer(any_client, [[word]], path=path, outputs=["LENGTHS"])["LENGTHS"].item() == len(word)


def test_strings_go_with_a_call_that_is_made_again_in_other_memory(any_client: AnyClient) -> None:
    assert infer(any_client, outputs=["SAME"])["SAME"].tolist() == WORDS.tolist()
    for _ in range(20):  # a result that a task still holds for a moment has the next call take other memory
        for region in own_regions():
            lose(region)
        assert infer(any_client, outputs=["SAME"])["SAME"].tolist() == WORDS.tolist()
        if any_client.stats().retries:
            return
    raise AssertionError("no call was made again")


@every_path
@pytest.mark.parametrize("value", [np.zeros((1, 2), np.float32), np.array([[1, 2]], object), [[1, 2]], [["a", 1.5]]])
def test_numbers_among_strings_are_refused_by_the_inputs_name(client: ShmClient, path: PathName, value: Any) -> None:
    with pytest.raises(TensorTypeError, match="'WORDS'") as refusal:
        client.infer("words", {"WORDS": value}, path=path)
    assert refusal.value.tensor == "WORDS"


def test_strings_for_an_input_of_numbers_are_refused_by_its_name(client: ShmClient) -> None:
    with pytest.raises(TensorError, match="'INPUT0' is BYTES, but the model's configuration says TYPE_FP32"):
        client.infer("identity", {"INPUT0": np.array(["1.5"])})
