"""Calls that go in band as they are small: the same answers, on the real server, by whatever client."""

from __future__ import annotations

import numpy as np
import pytest

from .flavours import Flavour

ROW = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_small_call_is_answered_as_a_large_one_is(flavour: Flavour, rows: int) -> None:
    x = np.tile(ROW, (rows, 1))
    with flavour.client(inline_bytes=None) as client:
        with client.infer("rows", {"X": x}, outputs=["DOUBLED"]) as by_default:
            np.testing.assert_array_equal(by_default["DOUBLED"], 2 * x)
            assert by_default.path == ("inline" if flavour.has_streams else "direct")
            doubled = by_default["DOUBLED"]
            doubled += 1  # what comes back in band may be written to, as shared memory may
        with client.infer("rows", {"X": x}, outputs=["DOUBLED"], path="direct") as direct:
            np.testing.assert_array_equal(direct["DOUBLED"], 2 * x)


def test_small_and_large_calls_side_by_side_get_their_own(flavour: Flavour) -> None:
    with flavour.client(inline_bytes=2**12) as client:
        for count in (1, 100, 10_000, 3, 300, 30_000, 0, 5):
            x = np.arange(count, dtype=np.float32)
            with client.infer("identity", {"INPUT0": x}, outputs={"OUTPUT0": x.nbytes}) as result:
                np.testing.assert_array_equal(result["OUTPUT0"], x)
                assert result.path == ("inline" if count <= 500 else "direct")
