"""Strings in shared memory that are not what they are said to be: an error for their sender, and for nobody else."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.client import ShmClient
from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.server import EmbeddedServer

from .hand_made import DATATYPES, FIRST_GENERATION, HandMade, Table, Tensor
from .hand_made import hand_made as made_for

WORDS: Final = [b"one", b"", b"\xff\0"]
ENCODED: Final = b"\x03\0\0\0one" + b"\0\0\0\0" + b"\x02\0\0\0\xff\0"
ROOM: Final = 256
SECRET: Final = b"what another tensor holds"


class StringsRequest:
    """A region whose last bytes are strings, and a table of them, sent by plain tritonclient."""

    def __init__(self, request: HandMade) -> None:
        self.request = request
        self.region = request.region
        self.record = request.record

    def send(self, model: str, encoded: bytes, shape: list[int], outputs: dict[str, int], **parameters: Any) -> Any:
        """Send strings that end where the region ends, with room for these outputs."""
        request, begin = self.request, self.region.data_offset
        self.region.bytes()[-len(encoded) :] = np.frombuffer(encoded, np.uint8)
        offset = self.region.header.byte_size - len(encoded)
        inputs = [Tensor(b"WORDS", offset, len(encoded), 0, DATATYPES["BYTES"], shape)]
        if model == "word_games":
            inputs.append(Tensor(b"SIGNAL", begin, 4, 0, DATATYPES["INT32"], [1]))
        places = enumerate(outputs.items(), 1)
        request.table = Table(inputs, [Tensor(name.encode(), begin + ROOM * n, size) for n, (name, size) in places])
        request.model = request.address.model = model
        request.parameters = parameters
        request.next()
        return request.infer(outputs=list(outputs))

    def results(self) -> dict[str, OutputPlace]:
        """Return what the model has written of its outputs."""
        return self.request.results()

    def written(self, name: str) -> bytes:
        """Return an output's bytes."""
        place = self.results()[name]
        return self.region.bytes()[place.offset : place.offset + place.byte_size].tobytes()

    def number_at(self, place: int) -> Any:
        """Return the number at the place of an output, or of the signal, which is 0."""
        begin = self.region.data_offset + ROOM * place
        return self.region.bytes()[begin : begin + 4].view(np.int32)


@pytest.fixture
def hand_made(triton_server: EmbeddedServer) -> Iterator[StringsRequest]:
    with made_for(triton_server.grpc_url, "words", {}, {}, tensor_count=1) as request:
        made = StringsRequest(request)
        yield made
        del made.record


@pytest.fixture
def honest(triton_server: EmbeddedServer) -> Iterator[ShmClient]:
    """A client that does not lie."""
    with ShmClient(triton_server.grpc_url, timeout_s=30) as client:
        yield client


def test_strings_that_end_where_the_region_ends_are_read(hand_made: StringsRequest) -> None:
    hand_made.send("words", ENCODED, [1, 3], {"LOUD": ROOM, "LENGTHS": 12})
    loud = hand_made.results()["LOUD"]
    assert (loud.dtype, loud.shape, loud.byte_size) == (BYTES, (1, 3), len(ENCODED))
    assert hand_made.written("LOUD") == ENCODED.replace(b"one", b"ONE")
    assert np.frombuffer(hand_made.written("LENGTHS"), np.int32).tolist() == [3, 0, 2]


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
    hand_made: StringsRequest, honest: ShmClient, lie: str, output: str
) -> None:
    encoded, shape = LIES[lie]
    memory, begin = hand_made.region.bytes(), hand_made.region.data_offset
    memory[begin : begin + len(SECRET)] = np.frombuffer(SECRET, np.uint8)
    with pytest.raises(InferenceServerException) as refusal:
        hand_made.send("words", encoded, shape, {output: ROOM})
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert code_in(refusal.value.message()) == "shm:tensor"
    message = refusal.value.message()
    assert f"'WORDS' has {len(encoded)} bytes, but the lengths of its strings lead beyond them" in message
    assert not memory[begin + ROOM : begin + 2 * ROOM].any()
    assert hand_made.record.completed == FIRST_GENERATION + 1
    with honest.infer("words", {"WORDS": [["fine"]]}, outputs=["LOUD"]) as result:
        assert result["LOUD"].item() == b"FINE"


@pytest.mark.parametrize("shape", [[1, 6], [2**31, 2**31], [2**62, 2**62]], ids=str)
def test_more_strings_than_there_are_lengths_are_refused_before_the_model_runs(
    hand_made: StringsRequest, shape: list[int]
) -> None:
    with pytest.raises(InferenceServerException, match=r"shm:table: inputs\[0\].byte_size: found 17, expected room "):
        hand_made.send("words", ENCODED, shape, {"LOUD": ROOM})
    assert hand_made.record.started == 0


@pytest.mark.parametrize("written", [b"\xff" * len(ENCODED), b"\0" * len(ENCODED)], ids=["larger", "smaller"])
def test_a_client_that_changes_lengths_while_the_model_reads_changes_nothing(
    hand_made: StringsRequest, written: bytes
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
