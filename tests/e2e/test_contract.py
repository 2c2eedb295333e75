"""What each of the four clients carries to the real server and back, on each path. Details are tests/harness's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError, PathUnavailableError, ShmClient
from shm_backend_utils.client.options import PathName
from shm_backend_utils.server import EmbeddedServer
from tests.releases import reads_numpy_1_alone

from .eventually import conversed
from .flavours import AnyClient
from .in_band import EVERY_PATH_OF_STRINGS
from .own_regions import lies_in_shared_memory, lose, own_regions
from .wiretap import Wiretap

pytestmark = pytest.mark.every_flavour

every_region = pytest.mark.every_region
FOUR: Final = np.array([1.5, -2, 0, np.inf], np.float32)

IMAGES: Final = np.ones((1, 3, 224, 224), np.float32)
WORDS: Final = np.array([[b"a", "ü".encode(), b""], [b"\xff", b"\0", b"ends with nothing\0"]], object)
OF_NUMPY: Final = [[np.bytes_(b"a"), np.str_("ü"), ""], [np.bytes_(b"\xff"), "\0", b"ends with nothing\0"]]
LOUD: Final = [[word.upper() for word in row] for row in WORDS]


def test_the_path_that_was_asked_for_is_taken(any_client: AnyClient, path: PathName) -> None:
    for size in (0, 1, 7, 1 << 20):
        x = np.random.default_rng(size).random(size, np.float32)
        with any_client.infer("identity", {"INPUT0": x}, path=path) as result:
            assert result.path == path
            assert result["OUTPUT0"].shape == (size,)
            assert result["OUTPUT0"].tobytes() == x.tobytes()


def test_a_prepared_call_gives_what_is_in_its_inputs_each_time(any_client: AnyClient, path: PathName) -> None:
    with any_client.prepare("identity", {"INPUT0": ((4,), np.float32)}, path=path) as call:
        assert call.path == path
        for value in (1, 2, 3):
            call.inputs["INPUT0"][:] = value
            with call.infer() as result:
                assert result["OUTPUT0"].tolist() == [value] * 4


@pytest.mark.parametrize("path", ["auto", "triton-shm", "inline"])
def test_a_model_that_knows_nothing_of_this_library(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("unaware", {"X": FOUR}, path=path) as result:
        assert result.path == ("triton-shm" if path == "auto" else path)
        np.testing.assert_array_equal(result["Y"], FOUR)
    with pytest.raises(PathUnavailableError, match="model 'unaware' does not declare the direct path"):
        any_client.infer("unaware", {"X": FOUR}, path="direct")


@pytest.mark.parametrize("model", ["ensemble_pipeline", "two_steps"])
def test_an_ensemble_is_not_told_to_declare_anything(grpc_client: ShmClient, model: str) -> None:
    explanation = grpc_client.explain(model)
    assert explanation.path == "triton-shm"
    assert f"model '{model}' is an ensemble" in explanation.reason
    assert "does not declare" not in str(explanation)
    assert "optional" not in str(explanation)


@every_region
def test_model_and_client_see_each_others_writes_while_the_request_runs(any_client: AnyClient) -> None:
    with any_client.prepare("handshake", {"QUESTION": ((2,), np.int64)}) as call:
        question = call.inputs["QUESTION"]
        question[:] = [1, 1]
        answer = call.infer()["ANSWER"]  # a view: the next answer will appear here
        question[:] = [41, 0]
        answer[:] = 0
        seen = conversed(question, answer, lambda: call.infer().release())
    assert seen == [42]  # the model's write reached the client before the response did
    assert answer[1] == 77  # the client's write reached the model after the request did


@every_region
def test_an_input_that_the_model_passes_through_is_where_the_client_wrote_it(any_client: AnyClient) -> None:
    with any_client.prepare("identity", {"INPUT0": ((1000,), np.float32)}) as call, call.infer() as result:
        assert result["OUTPUT0"].ctypes.data == call.inputs["INPUT0"].ctypes.data


@every_region
@pytest.mark.parametrize("path", ["direct", "triton-shm"])
def test_outputs_lie_in_shared_memory_and_the_wire_carries_none(any_client: AnyClient, path: PathName) -> None:
    with any_client.infer("multiply", {"INPUT0": IMAGES}, path=path) as result:
        assert lies_in_shared_memory(result["OUTPUT0"])
        assert result.bytes_avoided == 2 * IMAGES.nbytes


def test_a_gibibyte_takes_no_memory_beyond_the_clients(grpc_client: ShmClient, triton_server: EmbeddedServer) -> None:
    def pool_bytes() -> int:
        return sum(pool.stat().st_size for pool in Path("/dev/shm").glob(f"{triton_server.shm_prefix}*"))

    with grpc_client.prepare("identity", {"INPUT0": ((2**28,), np.float32)}) as call:
        call.inputs["INPUT0"][-1] = 7
        before = pool_bytes()
        with call.infer() as result:
            assert result["OUTPUT0"].nbytes == 2**30
            assert result["OUTPUT0"][-1] == 7
        assert pool_bytes() == before


@pytest.mark.parametrize("path", EVERY_PATH_OF_STRINGS)
def test_strings_go_and_come(any_client: AnyClient, path: PathName) -> None:
    for words in (WORDS, OF_NUMPY):  # the second time their size is known
        with any_client.infer("words", {"WORDS": words}, path=path) as result:
            assert result.path == path
            assert result["LOUD"].tolist() == LOUD
            assert result["LENGTHS"].tolist() == [[len(word) for word in row] for row in WORDS]
            assert result["SAME"].tolist() == WORDS.tolist()


def test_a_request_carries_no_strings_and_neither_does_its_answer(tapped_client: AnyClient, wiretap: Wiretap) -> None:
    word = b"needle in a haystack"
    first = tapped_client.infer("words", {"WORDS": [[word]]}, outputs={"LOUD": 64, "SAME": None})
    assert (first["LOUD"].item(), first["SAME"].item()) == (word.upper(), word)
    assert (first.overflowed, first.bytes_avoided) == ({}, 3 * 24)  # each string with its length
    assert word not in wiretap.sent


def test_strings_go_with_a_call_that_is_made_again_in_other_memory(any_client: AnyClient) -> None:
    for _ in range(20):  # a result that a task still holds for a moment has the next call take other memory
        with any_client.infer("words", {"WORDS": WORDS}, outputs=["SAME"]) as result:
            assert result["SAME"].tolist() == WORDS.tolist()
        del result
        if any_client.stats().retries:
            return
        for region in own_regions():
            lose(region)
    raise AssertionError("no call was made again")


@reads_numpy_1_alone
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="with NumPy 1, every stub takes strings")
@pytest.mark.parametrize("path", ["triton-shm", "inline"])
def test_strings_that_the_stub_cannot_take_tell_the_way_out(any_client: AnyClient, path: PathName) -> None:
    with pytest.raises(InferenceError, match="install numpy<2 or a newer Triton; the direct path is not affected"):
        any_client.infer("word_games", {}, outputs=["Y"], parameters={"game": "list"}, path=path)


def test_an_output_without_room_is_in_the_response_and_has_some_the_next_time(any_client: AnyClient) -> None:
    thrice: dict[str, Any] = {"parameters": {"times": 3}, "path": "direct"}
    with any_client.infer("repeat", {"X": FOUR}, outputs={"Y": 4, "RUNS": 8}, **thrice) as result:
        assert result.overflowed == {"Y": 48}
        np.testing.assert_array_equal(result["Y"], np.tile(FOUR, 3))
        runs = int(result["RUNS"][0])
    with any_client.infer("repeat", {"X": FOUR}, outputs=["Y", "RUNS"], **thrice) as result:
        assert result.overflowed == {}
        np.testing.assert_array_equal(result["Y"], np.tile(FOUR, 3))
        assert int(result["RUNS"][0]) == runs + 1
