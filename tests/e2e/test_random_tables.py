"""Broken tables at a real server: each is refused with a code, or served; nothing is written elsewhere."""

from __future__ import annotations

import collections
import http.client
import json
import random
import re
import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from shm_backend_utils import dtypes
from shm_backend_utils.errors import code_in
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.claims import LentRegionClaim, NamedRegionClaim, RegionClaim
from shm_backend_utils.protocol.layout import SlotRecord
from shm_backend_utils.protocol.parameters import SlotAddress
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from shm_backend_utils.server import EmbeddedServer
from tests.property.random_tables import mutated

FP32: Final = dtypes.BY_NAME["FP32"]
DATA_SIZE: Final = 65536
EXPECTED: Final = {"", "shm:table", "shm:tensor", "shm:missing", "shm:gone", "shm:refused", "shm:stale"}
NAMES_THE_FIELD: Final = re.compile(r"shm:table: (length|probe|\w+_count|frame_|inputs|outputs|regions)[^:]*: found ")


@pytest.fixture
def region() -> Iterator[ManagedRegion]:
    region = ManagedRegion.create(DATA_SIZE)
    yield region
    region.segment.unlink()
    region.close()


def valid_tables(region: ManagedRegion, rng: random.Random) -> list[Table]:
    """Return tables of model `repeat`, most of which it serves."""
    begin = region.data_offset
    gone = LentRegionClaim("shmbu-not-there", 4096, "0" * 32, 0)
    own = LentRegionClaim(region.segment.key, region.header.byte_size, region.header.token.hex(), 0)
    further: list[tuple[RegionClaim, ...]] = [(), (), (), (gone,), (own,), (NamedRegionClaim("not registered"),)]
    tables = []
    for _ in range(200):
        count = rng.choice([0, 1, 4, 100, 4096])
        inputs = {"X": InputSpan(FP32, (count,), 0, begin + 4 * rng.randrange(1000), 4 * count)}
        outputs = {"Y": OutputSpan(0, begin + 32768 + 4 * rng.randrange(1000), rng.choice([0, 4, 4 * count]))}
        ring = rng.choice([None, None, None, Ring(1, 2, 16384)])
        tables.append(Table(inputs, rng.choice([outputs, {}]), rng.choice(further), ring))
    return tables


def test_broken_tables_are_refused_with_a_code_and_write_nothing_and_the_instance_lives(
    region: ManagedRegion, triton_server: EmbeddedServer, request: pytest.FixtureRequest
) -> None:
    count: int = request.config.getoption("--tables") * (1 + request.config.getoption("--all"))
    rng = random.Random(1)
    host, _, port = triton_server.http_url.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    address = str(SlotAddress("repeat", region.segment.key, region.header.token.hex(), 0))
    record, data = region.record(0), region.data()
    data[:] = np.frombuffer(rng.randbytes(DATA_SIZE), np.uint8)
    pattern = data.copy()
    codes: collections.Counter[str] = collections.Counter()

    def ask(generation: int) -> tuple[int, str]:
        parameters = {"shm_slot": address, "shm_generation": generation, "times": 1}
        body = json.dumps({"inputs": [], "outputs": [{"name": "Y"}], "parameters": parameters})
        connection.request("POST", "/v2/models/repeat/infer", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, str(answer.get("error", ""))

    tables = valid_tables(region, rng)
    writes = 0
    for generation in range(1, count + 1):
        encoded = table.encode(rng.choice(tables))
        broken = mutated(rng, bytes(8) + encoded + bytes(64), 8, 8 + struct.unpack_from("<I", encoded)[0])
        record.begin(generation, broken[8:])
        status, text = ask(generation)
        code = code_in(text)
        codes[code] += 1
        assert code in EXPECTED
        assert (status == 200) == (code == "" == text)
        assert code != "shm:table" or (status == 400 and NAMES_THE_FIELD.match(text))
        written = np.flatnonzero(data != pattern)
        if written.size:
            _, found = table.decode(bytes(record.request), region.data_offset, region.header.byte_size)
            (room,) = found.outputs.values()
            begin = room.offset - region.data_offset
            writes += 1
            assert begin <= written[0]
            assert written[-1] < begin + room.byte_size
            check_answer(region, record, found, pattern)
            data[:] = pattern
        assert (record.completed == generation) == (code in {"", "shm:missing"})
        lease = region.lease(0)
        assert lease.take_back()  # whatever it was, nobody holds the slot
        lease.give_back()
    record.begin(count + 1, table.encode(Table({"X": InputSpan(FP32, (4,), 0, region.data_offset, 16)}, {})))
    assert ask(count + 1) == (200, "")
    connection.close()
    assert min(writes, codes["shm:table"], codes["shm:tensor"], codes["shm:gone"]) >= count // 100, (writes, codes)


def check_answer(region: ManagedRegion, record: SlotRecord, asked: Table, before: npt.NDArray[np.uint8]) -> None:
    """See that what the model has written is what it was asked for: Y is X."""
    (x,) = asked.inputs.values()
    (y,) = results.decode(bytes(record.results), [region.header.byte_size]).outputs
    assert (y.shape, y.byte_size) == (x.shape, x.byte_size)
    begin = x.offset - region.data_offset
    answer = region.bytes()[y.offset : y.offset + y.byte_size]
    assert answer.tobytes() == before[begin : begin + x.byte_size].tobytes()
