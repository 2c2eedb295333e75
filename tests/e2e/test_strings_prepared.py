"""Calls that are prepared for strings, which the user fills as objects."""

from __future__ import annotations

from typing import Any

import pytest

from shm_backend_utils.client import ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.errors import TensorError, TensorTypeError

from .flavours import AnyClient
from .in_band import EVERY_PATH_OF_STRINGS

every_path = pytest.mark.parametrize("path", EVERY_PATH_OF_STRINGS)
every_dtype = pytest.mark.parametrize("dtype", ["S20", "U20", object], ids=str)


@every_path
@every_dtype
def test_a_prepared_call_takes_other_strings_each_time(any_client: AnyClient, path: PathName, dtype: Any) -> None:
    with any_client.prepare("words", {"WORDS": ((1, 2), dtype)}, outputs=["LOUD", "SAME"], path=path) as call:
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


@every_path
def test_strings_that_were_not_filled_are_empty(client: ShmClient, path: PathName) -> None:
    with client.prepare("words", {"WORDS": ((1, 2), "S20")}, outputs=["SAME"], path=path) as call:
        call.inputs["WORDS"][0, 1] = "b"
        assert call.infer()["SAME"].tolist() == [[b"", b"b"]]


def test_strings_that_outgrow_their_room_are_an_error_that_tells_the_remedy(client: ShmClient) -> None:
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


@every_path
@pytest.mark.parametrize("element", [1, None, 2.5], ids=str)
def test_what_is_no_string_is_refused_by_the_inputs_name(client: ShmClient, path: PathName, element: Any) -> None:
    with client.prepare("words", {"WORDS": ((1, 2), "S20")}, outputs=["SAME"], path=path) as call:
        call.inputs["WORDS"][0] = ["a", element]
        with pytest.raises(TensorTypeError, match="'WORDS'"):
            call.infer()
        call.inputs["WORDS"][0] = ["a", "b"]
        assert call.infer()["SAME"].tolist() == [[b"a", b"b"]]


@every_path
def test_strings_of_the_last_result_stay_when_the_call_is_made_again(client: ShmClient, path: PathName) -> None:
    with client.prepare("words", {"WORDS": ((1, 1), "S20")}, outputs={"LOUD": 100}, path=path) as call:
        call.inputs["WORDS"][:] = "first"
        first = call.infer()["LOUD"]
        call.inputs["WORDS"][:] = "second"
        assert (call.infer()["LOUD"].item(), first.item()) == (b"SECOND", b"FIRST")


@every_path
def test_a_tensor_of_no_strings(client: ShmClient, path: PathName) -> None:
    with client.prepare("words", {"WORDS": ((0, 2), "S20")}, path=path) as call:
        assert call.infer()["LOUD"].shape == (0, 2)
