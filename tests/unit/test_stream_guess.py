"""How much room a stream's frames get for outputs whose size nobody knows yet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from shm_backend_utils.client import PoolOptions
from shm_backend_utils.client.inputs.descriptions import described_inputs
from shm_backend_utils.client.known_model import KnownModel
from shm_backend_utils.client.paths.stream import guessed_rooms
from shm_backend_utils.errors import CallerError
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.model_spec import ModelSpec
from shm_backend_utils.protocol.call_layout import ALIGNMENT, CallLayout

MOST = 2**20
SPEC = ModelSpec.from_config(
    {
        "name": "frames",
        "max_batch_size": 4,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [
            {"name": "KNOWN", "data_type": "TYPE_FP32", "dims": [3]},
            {"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]},
            {"name": "Z", "data_type": "TYPE_FP32", "dims": [-1]},
        ],
    }
)


@pytest.fixture
def known() -> KnownModel:
    return KnownModel(SPEC, head_room=1.0)


def laid_out(
    known: KnownModel,
    frames: int,
    wanted: Mapping[str, int | None] | None = None,
    guesses: Mapping[str, int] | None = None,
    rows: int = 1,
) -> CallLayout:
    given = described_inputs({"X": ((rows, 3), np.float32)})
    return known.lay_out(given, wanted, slot_count=1 + frames, learned={**(guesses or {}), **known.learned})


@pytest.mark.parametrize("frames", [1, 4, 64, 1000])
@pytest.mark.parametrize("rows", [1, 4])
def test_all_frames_together_take_no_more_than_they_may(known: KnownModel, frames: int, rows: int) -> None:
    guesses = guessed_rooms(laid_out(known, frames, rows=rows), frames, MOST)
    made = laid_out(known, frames, guesses=guesses, rows=rows)
    rooms = {name: room.byte_size for name, room in made.table.outputs.items()}
    assert rooms["KNOWN"] == 12 * rows
    assert rooms["Y"] == rooms["Z"] == rows * guesses["Y"]
    assert MOST - 2 * frames * rows * ALIGNMENT < frames * (rooms["Y"] + rooms["Z"]) <= MOST


def test_a_hint_is_no_guess(known: KnownModel) -> None:
    assert guessed_rooms(laid_out(known, 4, {"Y": 0, "Z": 8}), 4, MOST) == {}


def test_what_was_learned_is_no_guess(known: KnownModel) -> None:
    known.learn({"Y": 100, "Z": 200}, 1)
    unguessed = laid_out(known, 4)
    assert guessed_rooms(unguessed, 4, MOST) == {}
    made = laid_out(known, 4, guesses={"Y": 7, "Z": 7})
    assert {name: made.table.outputs[name].byte_size for name in "YZ"} == {"Y": 100, "Z": 200}


def test_without_memory_for_it_nothing_is_guessed(known: KnownModel) -> None:
    assert guessed_rooms(laid_out(known, 4), 4, 0) == {"Y": 0, "Z": 0}


def test_a_guess_never_takes_more_than_a_quarter_of_the_budget() -> None:
    pool = SlotPool(PoolOptions(max_bytes=2**20))
    assert pool.stream_guess_bytes == 2**18
    pool.close()


def test_a_guess_below_nothing_is_refused() -> None:
    with pytest.raises(CallerError, match="stream_guess_bytes is -1; expected bytes, 0 or more"):
        PoolOptions(stream_guess_bytes=-1)
