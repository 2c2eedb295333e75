"""Tables and slots that their client changes, or holds, while they are read."""

from __future__ import annotations

import random
import threading

import numpy as np
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import code_in
from shm_backend_utils.server import EmbeddedServer

from ..hand_made import STEP, HandMade
from .breaks import tensor, valid


class Rewriter(threading.Thread):
    """Writes the bytes of some tables, and noise, into a record in turn, a few bytes at a time, until it is ended."""

    def __init__(self, half: memoryview, tables: list[bytes]) -> None:
        super().__init__()
        self._half = half
        self._tables = [*tables * 5, random.Random(12).randbytes(len(tables[0]))]
        self._has_ended = threading.Event()

    def run(self) -> None:
        source = random.Random(12)
        while not self._has_ended.is_set():
            data = source.choice(self._tables)
            at = 0
            while at < len(data):
                end = min(len(data), at + source.choice([1, 7, 8, 24, 200]))
                self._half[8 + at : 8 + end] = data[at:end]
                at = end
        self._half.release()

    def end(self) -> None:
        self._has_ended.set()
        self.join()


def test_a_table_that_changes_while_it_is_copied_is_refused_or_answered_rightly(triton_server: EmbeddedServer) -> None:
    """Whatever the model has read, it answers that: rows of a ramp, wherever they begin and end."""
    ramp = np.arange(4 * STEP // 4, dtype=np.float32)
    with valid(triton_server.grpc_url, tensor_count=12) as request:
        begin = request.region.data_offset
        request.region.bytes()[begin : begin + ramp.nbytes] = ramp.view(np.uint8)
        tables = []
        for offset, count, room in ((begin, 4, begin + 4 * STEP), (begin + 512, 300, begin + 8 * STEP)):
            tensor("X", offset=offset, byte_size=4 * count, shape=[count])(request)
            tensor("Y", offset=room, byte_size=4 * count)(request)
            tables.append(request.table.packed(0)[8:])
        rewriter = Rewriter(request.record.request[:], tables)
        rewriter.start()
        try:
            lengths, codes = answers_of(request, 300)
        finally:
            rewriter.end()
        assert lengths >= {4, 300}
        assert codes
        assert codes <= {"shm:table", "shm:tensor", "shm:missing"}
        request.next()
        request.infer()
        assert request.output("Y", np.float32).tolist() == ramp[128:428].tolist()


def answers_of(request: HandMade, count: int) -> tuple[set[int], set[str]]:
    """Send requests, and check each answer; return how long answers were, and the codes of refusals."""
    lengths, codes = set(), set()
    for _ in range(count):
        request.next()
        request.record.generation = request.recorded
        try:
            response = request.send()
        except InferenceServerException as error:
            codes.add(code_in(error.message()))
            continue
        place = request.results()["Y"]
        written = request.array(place.offset, place.byte_size, np.float32)
        y = response.as_numpy("Y") if place.is_in_response else written
        assert place.shape == y.shape
        assert (np.diff(y) == 1).all()
        lengths.add(len(y))
    return lengths, codes
