"""Calls of other models with small tensors: in band where the other model takes that, with the same outcome."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.errors import TensorError
from shm_backend_utils.model import Call
from tests.unit.emulated import message_of
from tests.unit.forwarding.two_models import Models, config, two_models
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client

HALF = np.arange(8192, dtype=np.float32)
"""Half of what goes in band."""


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    with two_models(monkeypatch, config("other", "direct,inline")) as models:
        yield models


def paths_of(models: Models, client: Client, given: Any, outputs: Any = None, times: int = 1) -> list[tuple[str, str]]:
    """Return how X came to the other model, and Y from there, call by call."""
    found: list[tuple[str, str]] = []
    came: list[str] = []
    answer = models.answer or double

    def infer(call: Call) -> None:
        for _ in range(times):
            y = call.forward("other", {"X": given}, outputs)["Y"]
            assert y.numpy().tolist() == np.resize(given * 2, y.shape).tolist()
            assert not y.writable
            found.append((came.pop(), y.path))
        call.put("Y", np.zeros(4, np.float32))

    def noting(call: Call) -> None:
        came.append(call.input("X").path)
        answer(call)

    models.answer = noting
    response = models.serve(client, infer)
    assert response.error() is None, message_of(response)
    return found


IN_BAND = ("triton", "triton")
IN_MEMORY = ("direct", "direct")


@pytest.mark.parametrize(
    ("count", "room", "expected"),
    [
        (1, 4, IN_BAND),
        (8192, 32768, IN_BAND),
        (8192, 32769, IN_MEMORY),
        (8193, 32772, IN_MEMORY),
    ],
)
def test_up_to_64_kib_go_in_band(
    models: Models, client: Client, count: int, room: int, expected: tuple[str, str]
) -> None:
    assert paths_of(models, client, np.arange(count, dtype=np.float32), {"Y": room}) == [expected]


def test_outputs_that_turn_out_large_have_room_the_next_time(models: Models, client: Client) -> None:
    models.answer = lambda call: call.put("Y", np.resize(call.input("X").numpy() * 2, 20000))
    assert paths_of(models, client, HALF, None, 3) == [IN_BAND, IN_MEMORY, IN_MEMORY]


@pytest.mark.parametrize(
    "other",
    [
        config("other"),
        config("other", "direct,triton-shm"),
        config("other", "direct,inline", output=[tensor("Y"), tensor("Z", "STRING")]),
        config("other", "direct,inline", output=[tensor("Y"), tensor("Z", "BF16")]),
    ],
    ids=["direct alone", "not in band", "strings", "BF16"],
)
def test_a_model_that_may_not_take_them_in_band_does_not(
    monkeypatch: pytest.MonkeyPatch, client: Client, other: dict[str, Any]
) -> None:
    with two_models(monkeypatch, other) as models:
        assert paths_of(models, client, HALF, {"Y": 32768}) == [IN_MEMORY]


def test_none_go_in_band_if_the_configuration_says_so(models: Models, client: Client) -> None:
    models.caller._open_context().forwarder._inline_bytes = 0
    assert paths_of(models, client, HALF[:1], {"Y": 4}) == [IN_MEMORY]


def test_an_output_is_written_where_it_is_wanted(models: Models, client: Client) -> None:
    def infer(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        assert call.forward("other", {"X": call.input("X")}, {"Y": y})["Y"] is y

    assert models.serve(client, infer).error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("inline_bytes", [0, 2**16])
@pytest.mark.parametrize(
    "given",
    [{}, {"X": HALF[:4]}, {"X": np.zeros((5, 1), np.float32)}, {"X": np.zeros((0, 1), np.float32)}],
    ids=["nothing", "no batch", "too many rows", "no row"],
)
def test_what_the_other_model_does_not_take_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, client: Client, given: dict[str, Any], inline_bytes: int
) -> None:
    other = config("other", "direct,inline", max_batch_size=4)
    other["input"].append(tensor("SHM", "UINT8"))

    def infer(call: Call) -> None:
        with pytest.raises(TensorError):
            call.forward("other", given)
        call.put("Y", np.zeros(4, np.float32))

    with two_models(monkeypatch, other) as models:
        models.caller._open_context().forwarder._inline_bytes = inline_bytes
        response = models.serve(client, infer)
        assert response.error() is None, message_of(response)
