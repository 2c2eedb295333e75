"""The same call gives the same result, whichever way its tensors go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shm_backend_utils.client import PathUnavailableError
from shm_backend_utils.client.options import PathName
from tests.releases import carries_bf16

from .flavours import AnyClient
from .in_band import NUMBERS, strings_in_band

FOUR = np.array([1.5, -2, 0, np.inf], np.float32)


def test_the_path_that_was_asked_for_is_taken(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("identity", {"INPUT0": FOUR}, path=path) as result:
        assert result.path == path
        np.testing.assert_array_equal(result["OUTPUT0"], FOUR)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_results_do_not_depend_on_the_path(any_client: AnyClient, path: PathName, size: int) -> None:
    x = np.random.default_rng(size).random(size, np.float32)
    with any_client.infer("identity", {"INPUT0": x}, path=path) as result:
        assert result["OUTPUT0"].tobytes() == x.tobytes()


def test_a_batch_does_not_depend_on_the_path(any_client: AnyClient, path: PathName) -> None:
    images = np.random.default_rng(3).random((3, 3, 224, 224), np.float32)
    with any_client.infer("multiply", {"INPUT0": images}, path=path) as result:
        np.testing.assert_array_equal(result["OUTPUT0"], images * 2)


@carries_bf16
def test_all_dtypes_in_one_request(any_client: AnyClient, path: PathName) -> None:
    inputs = {f"IN_{name}": np.arange(7).astype(dtype.numpy) for name, dtype in NUMBERS.items()}
    with any_client.infer("every_dtype", inputs, path=path) as result:
        for name, dtype in NUMBERS.items():
            assert result[f"OUT_{name}"].dtype == dtype.numpy
            np.testing.assert_array_equal(result[f"OUT_{name}"], inputs[f"IN_{name}"][::-1])


def test_an_empty_tensor(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("identity", {"INPUT0": np.empty(0, np.float32)}, path=path) as result:
        assert result["OUTPUT0"].shape == (0,)
        assert result["OUTPUT0"].dtype == np.float32


def test_a_prepared_call_gives_what_is_in_its_inputs_each_time(any_client: AnyClient, path: PathName) -> None:
    with any_client.prepare("identity", {"INPUT0": ((4,), np.float32)}, path=path) as call:
        assert call.path == path
        for value in (1, 2, 3):
            call.inputs["INPUT0"][:] = value
            with call.infer() as result:
                assert result["OUTPUT0"].tolist() == [value] * 4


@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_a_model_that_knows_nothing_of_this_library(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("unaware", {"X": FOUR}, path=path) as result:
        assert result.path == path
        np.testing.assert_array_equal(result["Y"], FOUR)


def test_a_model_that_knows_nothing_of_this_library_is_called_through_tritons_shared_memory(
    any_client: AnyClient,
) -> None:
    with any_client.infer("unaware", {"X": FOUR}) as result:
        assert result.path == "triton-shm"


def test_a_model_that_knows_nothing_of_this_library_cannot_be_called_directly(any_client: AnyClient) -> None:
    with pytest.raises(PathUnavailableError, match="model 'unaware' does not declare the direct path"):
        any_client.infer("unaware", {"X": FOUR}, path="direct")


@strings_in_band
@pytest.mark.parametrize("path", ["triton-shm", "inline"])
@pytest.mark.parametrize(
    "words",
    [
        np.array([b"one", b"", b"three"], np.object_),
        np.array(["one", "", "three"], np.object_),
        np.array(["one", "", "three"]),
        np.array([b"one", b"", b"three"]),
        ["one", "", "three"],
    ],
    ids=["bytes objects", "str objects", "str array", "bytes array", "list of str"],
)
def test_strings(any_client: AnyClient, path: PathName, words: Any) -> None:
    with any_client.infer("spelling", {"WORDS": words}, path=path) as result:
        assert result.path == path
        assert result["LOUD"].tolist() == [b"ONE", b"", b"THREE"]
        assert result["LENGTHS"].tolist() == [3, 0, 5]
