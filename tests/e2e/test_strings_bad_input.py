"""Strings in shared memory that are not what they are said to be: an error for their sender, and for nobody else."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ShmClient
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.server import EmbeddedServer

WORDS: Final = [b"one", b"", b"\xff\0"]
ENCODED: Final = b"\x03\0\0\0one" + b"\0\0\0\0" + b"\x02\0\0\0\xff\0"
ROOM: Final = 256
SECRET: Final = b"what another tensor holds"


@dataclass
class HandMade:
    """A region whose last bytes are strings, and a descriptor of them, sent by plain tritonclient."""

    region: ManagedRegion
    grpc: Any

    def send(self, model: str, encoded: bytes, shape: list[int], outputs: dict[str, int], **parameters: Any) -> Any:
        """Send strings that end where the region ends, with room for these outputs."""
        record = self.region.record(0)
        record.generation += 1
        memory, begin = self.region.bytes(), self.region.data_offset
        memory[-len(encoded) :] = np.frombuffer(encoded, np.uint8)
        offset = memory.nbytes - len(encoded)
        descriptor: dict[str, Any] = {
            "v": 1,
            "model": model,
            "regions": [self._claim()],
            "inputs": {"WORDS": [0, offset, len(encoded), "BYTES", shape]},
            "outputs": {name: [0, begin + ROOM * place, size] for place, (name, size) in enumerate(outputs.items(), 1)},
        }
        if model == "word_games":
            descriptor["inputs"]["SIGNAL"] = [0, begin, 4, "INT32", [1]]
        parameters |= {"shm_io": json.dumps(descriptor), "shm_generation": record.generation}
        wanted = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs]
        return self.grpc.infer(model, [], outputs=wanted, parameters=parameters, client_timeout=30)

    def results(self) -> Any:
        """Return what the model has written of its outputs."""
        return json.loads(self.region.record(0).results())

    def written(self, name: str) -> bytes:
        """Return an output's bytes."""
        *_, nbytes, _, offset = self.results()[name]
        return self.region.bytes()[offset : offset + nbytes].tobytes()

    def number_at(self, place: int) -> Any:
        """Return the number at the place of an output, or of the signal, which is 0."""
        begin = self.region.data_offset + ROOM * place
        return self.region.bytes()[begin : begin + 4].view(np.int32)

    def _claim(self) -> dict[str, Any]:
        token = self.region.header.token.hex()
        key, byte_size = self.region.segment.key, self.region.header.byte_size
        return {"kind": "system", "key": key, "byte_size": byte_size, "token": token, "slot": 0}


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[HandMade]:
    region = ManagedRegion.create(4096)
    grpc = tritonclient.grpc.InferenceServerClient(triton_server.grpc_url)
    try:
        yield HandMade(region, grpc)
    finally:
        grpc.close()
        region.segment.unlink()
        region.close()


@pytest.fixture
def honest(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    """A client that does not lie."""
    with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
        yield client


def test_strings_that_end_where_the_region_ends_are_read(hand_made: HandMade) -> None:
    hand_made.send("words", ENCODED, [1, 3], {"LOUD": ROOM, "LENGTHS": 12})
    assert hand_made.results()["LOUD"][:3] == ["BYTES", [1, 3], len(ENCODED)]
    assert hand_made.written("LOUD") == ENCODED.replace(b"one", b"ONE")
    assert np.frombuffer(hand_made.written("LENGTHS"), np.int32).tolist() == [3, 0, 2]


def test_strings_that_are_passed_through_are_not_copied(hand_made: HandMade) -> None:
    hand_made.send("words", ENCODED, [1, 3], {"SAME": ROOM})
    offset = hand_made.region.header.byte_size - len(ENCODED)
    assert hand_made.results() == {"SAME": ["BYTES", [1, 3], len(ENCODED), 0, offset]}


def test_strings_that_find_no_room_are_in_the_response_as_bytes(hand_made: HandMade) -> None:
    response = hand_made.send("words", ENCODED, [1, 3], {"LOUD": len(ENCODED) - 1})
    assert hand_made.results() == {"LOUD": ["BYTES", [1, 3]]}
    assert response.as_numpy("LOUD").tobytes() == ENCODED.replace(b"one", b"ONE")


def test_other_strings_in_the_same_place_are_not_taken_for_the_last_ones(hand_made: HandMade) -> None:
    for word in (b"one", b"two", b"six", b"ten", b"end"):
        hand_made.send("words", b"\x03\0\0\0" + word, [1, 1], {"LOUD": ROOM})
        assert hand_made.written("LOUD") == b"\x03\0\0\0" + word.upper()


LIES: Final = {
    "one byte less": (ENCODED[:-1], [1, 3]),
    "one more than there are": (ENCODED, [2, 2]),
    "a length that is cut off": (ENCODED[:-3], [1, 3]),
    "a length beyond the end": (struct.pack("<I", 5) + b"four", [1, 1]),
    "the largest length": (b"\xff\xff\xff\xff" + b"four", [1, 1]),
    "a negative length": (struct.pack("<i", -4) + b"four", [1, 1]),
    "the length of the whole region": (struct.pack("<I", 8192 + 4096) + b"four", [1, 1]),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("output", ["LOUD", "LENGTHS"])
def test_a_lying_length_is_refused_by_the_inputs_name_and_the_next_request_is_served(
    hand_made: HandMade, honest: ShmClient, lie: str, output: str
) -> None:
    encoded, shape = LIES[lie]
    memory, begin = hand_made.region.bytes(), hand_made.region.data_offset
    memory[begin : begin + len(SECRET)] = np.frombuffer(SECRET, np.uint8)
    with pytest.raises(InferenceServerException) as refusal:
        hand_made.send("words", encoded, shape, {output: ROOM})
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    message = refusal.value.message()
    assert f"'WORDS' has {len(encoded)} bytes, but the lengths of its strings lead beyond them" in message
    assert not memory[begin + ROOM : begin + 2 * ROOM].any()
    assert hand_made.region.record(0).completed == 1
    with honest.infer("words", {"WORDS": [["fine"]]}, outputs=["LOUD"]) as result:
        assert result["LOUD"].item() == b"FINE"


@pytest.mark.parametrize("shape", [[1, 6], [2**31, 2**31], [2**62, 2**62]], ids=str)
def test_more_strings_than_there_are_lengths_are_refused_before_the_model_runs(
    hand_made: HandMade, shape: list[int]
) -> None:
    with pytest.raises(InferenceServerException, match=r"shm_io.inputs.WORDS\[2\]: found 17, expected at least "):
        hand_made.send("words", ENCODED, shape, {"LOUD": ROOM})
    assert hand_made.region.record(0).started == 0


def test_no_strings_of_a_shape_that_no_array_has_are_an_error(hand_made: HandMade, honest: ShmClient) -> None:
    with pytest.raises(InferenceServerException):
        hand_made.send("words", ENCODED, [0, 2**62], {"LOUD": ROOM})
    honest.infer("words", {"WORDS": [["fine"]]}).release()


def test_strings_that_nobody_reads_may_be_anything(hand_made: HandMade) -> None:
    hand_made.send("words", b"\xff\xff\xff\xff", [1, 1], {"SAME": ROOM})
    assert hand_made.results()["SAME"][:3] == ["BYTES", [1, 1], 4]


@pytest.mark.parametrize("written", [b"\xff" * len(ENCODED), b"\0" * len(ENCODED)], ids=["larger", "smaller"])
def test_a_client_that_changes_lengths_while_the_model_reads_changes_nothing(
    hand_made: HandMade, written: bytes
) -> None:
    signal, is_read = hand_made.number_at(0), hand_made.number_at(2)
    has_ended = threading.Event()
    seen = []

    def interfere() -> None:
        while not is_read[0] and not has_ended.wait(0.001):
            pass
        seen.append(int(is_read[0]))
        hand_made.region.bytes()[-len(written) :] = np.frombuffer(written, np.uint8)
        signal[0] = 1

    client = threading.Thread(target=interfere)
    client.start()
    hand_made.send("word_games", ENCODED, [3], {"Y": ROOM, "IS_READ": 4}, game="wait for the client")
    has_ended.set()
    client.join()
    assert seen == [1]  # it was before the response that the client wrote
    assert hand_made.written("Y") == b"\x03\0\0\0one" + ENCODED
    assert hand_made.region.bytes()[-len(written) :].tobytes() == written
