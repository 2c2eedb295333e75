"""Outputs that come with the response: they may be written to as those in shared memory may, if they are small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.fake_server import FakeServer, config
from tests.unit.fake_wires import client_of

SMALL, LARGE = 2**14, 2**14 + 1  # of 4 bytes: 64 KiB, and more


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("path", ["direct", "triton-shm", "inline"])
@pytest.mark.parametrize("count", [1, SMALL])
def test_a_small_output_of_unknown_size_may_be_written_to(protocol: Any, path: Any, count: int) -> None:
    x = np.ones(count, np.float32)
    with FakeServer(config("m")) as server, client_of(server, protocol) as client:
        for _ in range(2):
            result = client.infer("m", {"IN0": x}, path=path)
            result["OUT0"][...] += 1
            np.testing.assert_array_equal(result["OUT0"], 3 * x)


def test_a_large_one_is_not_copied_for_it() -> None:
    with FakeServer(config("m")) as server, client_of(server) as client:
        result = client.infer("m", {"IN0": np.ones(LARGE, np.float32)})
        assert result.overflowed
        assert not result["OUT0"].flags.writeable


def test_a_result_tells_which_came_with_the_response_though_the_path_shares_memory() -> None:
    x = np.ones(4, np.float32)
    with FakeServer(config("m")) as server, client_of(server) as client:
        open_size = client.infer("m", {"IN0": x}, path="triton-shm")
        assert (list(open_size.in_response), dict(open_size.overflowed)) == (["OUT0"], {})
        assert repr(open_size) == "<Result path=triton-shm 'OUT0' float32 [4] in_response=['OUT0']>"
        told = client.infer("m", {"IN0": x}, path="triton-shm", outputs={"OUT0": x.nbytes})
        assert list(told.in_response) == []
        assert repr(told) == "<Result path=triton-shm 'OUT0' float32 [4]>"
        overflowed = client.infer("m", {"IN0": x}, path="direct")
        assert list(overflowed.in_response) == ["OUT0"]
        assert list(client.infer("m", {"IN0": x}, path="direct").in_response) == []
        assert list(client.infer("m", {"IN0": x}, path="inline").in_response) == ["OUT0"]
