"""Sessions with SHM_DEBUG: an output not written, and a write to an input, are errors."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.model.debug import Poison
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import answers_to, delivered, error_of, message_of, outputs_of
from tests.unit.gpu.fakes import kernel as launch
from tests.unit.gpu.fakes import runtime_that_gives_all_back, stream_on
from tests.unit.modes.conftest import FP32, MakeClient, Open, X, batched, carrier_of, streaming
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client

SHM_DEBUG = {"SHM_DEBUG": "true"}
UNWRITTEN = "shm:model: model.py asked for output 'Y' and has not written "


@pytest.fixture
def session(open_session: Open) -> ShmSession:
    return open_session(parameters=SHM_DEBUG)


def forget(call: Call) -> None:
    """Make the common mistake: a name gets the result, and not the memory."""
    x = call.input("X")
    y = call.output("Y", x.shape, x.dtype).numpy()
    y = x.numpy() * 2  # noqa: F841


def test_an_output_that_was_not_written_is_an_error(session: ShmSession, client: Client) -> None:
    assert error_of(session, client.request({"X": X}, {"Y": 16}), double) == ""
    text = error_of(session, client.request({"X": X}, {"Y": 16}), forget)
    assert text.startswith(f"{UNWRITTEN}4 of its 4 elements")
    assert "y = call.output(…).numpy(); y[...] = x" in text
    assert client.is_over()
    assert not client.has_results()
    # So it is where the output goes back through Triton.
    assert error_of(session, client.request({"X": X}, {"Y": 4}), forget).startswith(UNWRITTEN)
    assert error_of(session, delivered({}, ["Y"], {"X": X}), forget).startswith(UNWRITTEN)
    (response,) = session.serve([delivered({}, ["Y"], {"X": X})], double)
    assert outputs_of(response)["Y"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("shape", "name", "written", "left"),
    [
        ((100,), "FP32", np.s_[::2], 50),
        ((16, 16, 3), "UINT8", np.s_[..., :-1], 256),
        ((7, 1), "FP32", np.s_[:-1], 1),
        ((50, 3), "FP16", np.s_[..., :-1], 50),
        ((1,), "FP64", np.s_[:0], 1),
        ((4,), "UINT8", np.s_[:0], 4),
    ],
)
def test_unwritten_parts_found(open_session: Open, shape: tuple[int, ...], name: str, written: Any, left: int) -> None:
    def infer(call: Call) -> None:
        call.output("Y", shape, BY_NAME[name].numpy).numpy()[written] = 0

    session = open_session(None, [tensor("Y", name, [-1] * len(shape))], parameters=SHM_DEBUG)
    (response,) = session.serve([delivered({}, ["Y"], {"X": X})], infer)
    found = re.search(r"has not written (\d+) of its", message_of(response))
    assert found is not None
    assert left <= int(found[1]) <= left + 20, "those that are equal by chance are counted, too"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 1000])
def test_what_was_written_is_served_at_any_size(session: ShmSession, client: Client, count: int) -> None:
    x = np.arange(count, dtype=np.float32)
    for room in (x.nbytes, x.nbytes + 3, 0):
        request = client.request({"X": x}, {"Y": room})
        (response,) = session.serve([request], double)
        assert response.error() is None
        found = client.output("Y") if room >= x.nbytes else outputs_of(response)["Y"]
        assert found.tolist() == (2 * x).tolist()


def test_an_output_that_is_asked_for_and_then_put_was_written(session: ShmSession, client: Client) -> None:
    def put_another(call: Call) -> None:
        call.output("Y", (2,), np.float32)
        call.put("Y", X)

    def put_it_back(call: Call) -> None:
        y = call.output("Y", (4,), np.float32)
        y.numpy()[...] = X
        call.put("Y", y)

    def put_the_input(call: Call) -> None:
        call.output("Y", (4,), np.float32)
        call.put("Y", call.input("X"))

    for infer in (put_another, put_it_back, put_the_input):
        assert error_of(session, client.request({"X": X}, {"Y": 16}), infer) == ""
        assert client.output("Y").tolist() == X.tolist()

    def put_what_was_not_written(call: Call) -> None:
        call.put("Y", call.output("Y", (4,), np.float32))

    text = error_of(session, client.request({"X": X}, {"Y": 16}), put_what_was_not_written)
    assert text.startswith(UNWRITTEN)


def rows(client: Client, *, side_by_side: bool) -> list[InferenceRequest]:
    requests = []
    for slot in range(2):
        at = client.data + slot * (16 if side_by_side else 512)
        np.ndarray((1, 4), np.float32, client.region.bytes(), at)[...] = slot + 1
        said = Table({"X": InputSpan(FP32, (1, 4), 0, at, 16)}, {"Y": OutputSpan(0, at + 1024, 16)})
        requests.append(delivered(client.begin(said, slot), ["Y"], carrier_of(1)))
    return requests


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_unwritten_rows_fail(open_session: Open, side_by_side: bool, written: int, make_client: MakeClient) -> None:
    client = make_client(slots=2)

    def infer(batch: BatchCall) -> None:
        x = batch.input("X").numpy()
        np.multiply(x[:written], 2, out=batch.output("Y", (4,), np.float32).numpy()[:written])

    responses = batched(open_session, parameters=SHM_DEBUG).serve_batch(rows(client, side_by_side=side_by_side), infer)
    for slot, response in enumerate(responses):
        if slot < written:
            assert response.error() is None
            assert client.output("Y", slot).tolist() == [[2 * slot + 2] * 4]
        else:
            assert message_of(response).startswith(f"{UNWRITTEN}4 of its 4 elements")
        assert client.is_over(slot)


@pytest.mark.parametrize("ring", [None, Ring(1, 3, 256)])
def test_in_a_stream_the_frame_is_found(open_session: Open, ring: Ring | None, make_client: MakeClient) -> None:
    client = make_client(slots=4)
    request = client.request({"X": X}, {"Y": 16}, ring=ring)

    def answer(call: StreamCall) -> Iterator[None]:
        for _ in range(2):
            double(call)
            yield
        forget(call)
        yield

    streaming(open_session, parameters=SHM_DEBUG).serve_streams([request], answer)
    *frames, last = answers_to(request).sent
    assert [None if frame is None else frame.error() for frame in frames] == [None, None]
    assert message_of(last).startswith(UNWRITTEN)
    assert client.is_over()


def copied_by_the_library(call: Call, stream: int) -> None:
    launch(stream, slowly_double, call.to_device(call.input("X"), stream), call.device_output("Y", (4,), "f4").array)


def copied_by_the_model(call: Call, stream: int) -> None:
    x, y = call.input("X").numpy(), call.output("Y", (4,), np.float32).numpy()
    launch(stream, lambda _: slowly_double(x, y), call.to_device(call.input("X"), stream))


def slowly_double(x: Any, y: Any) -> None:
    time.sleep(0.02)
    np.multiply(x, 2, out=y)


@pytest.mark.parametrize("room", [16, 0])
@pytest.mark.parametrize("infer", [copied_by_the_library, copied_by_the_model])
def test_a_late_gpus_output(open_session: Open, client: Client, infer: Callable[[Call, int], None], room: int) -> None:
    with runtime_that_gives_all_back() as cuda, stream_on(cuda) as stream:
        session = open_session(parameters=SHM_DEBUG, cuda=CudaAccess(lambda: cuda))
        (response,) = session.serve([client.request({"X": X}, {"Y": room})], lambda call: infer(call, stream))
        assert response.error() is None
        assert (client.output("Y") if room else outputs_of(response)["Y"]).tolist() == [0, 2, 4, 6]
        session.close()


def change_and_answer(call: Call) -> None:
    byte = ctypes.c_ubyte.from_address(call.input("X").numpy().__array_interface__["data"][0])
    byte.value ^= 0xFF
    double(call)


def test_an_input_that_model_py_changes_is_an_error_wherever_it_came_from(open_session: Open, client: Client) -> None:
    assert error_of(open_session(), client.request({"X": X}, {"Y": 16}), change_and_answer) == "", "without SHM_DEBUG"
    session = open_session(parameters=SHM_DEBUG)
    text = error_of(session, client.request({"X": X}, {"Y": 16}), change_and_answer)
    assert text.startswith("shm:model: input 'X' was changed during the call, most likely by model.py")
    assert "copy it first" in text
    assert client.is_over()
    assert not client.has_results()
    assert error_of(session, delivered({}, ["Y"], {"X": X}), change_and_answer) == text
    assert error_of(session, client.request({"X": X}, {"Y": 16}), double) == ""


@pytest.mark.parametrize("item_size", [1, 2, 4, 8])
def test_all_that_was_not_written_is_left_and_nothing_of_what_was_whatever_with(item_size: int) -> None:
    for count in (0, 40, 3_000_001):
        assert Poison(np.zeros(item_size * count, np.uint8)).left(item_size) == count
    data, other = np.zeros((2, item_size * 3_000_000), np.uint8)
    Poison(other)  # two poisons are two
    for value in (0, 1, 255, np.random.default_rng(1).integers(0, 256, len(data), np.uint8), other):
        poison = Poison(data)
        data[:] = value
        assert poison.left(item_size) == 0


@given(st.sampled_from((4, 8)), st.integers(1, 1000), st.data())
def test_one_element_of_four_bytes_and_more_is_found(item_size: int, count: int, data: st.DataObject) -> None:
    memory = np.zeros(item_size * count, np.uint8)
    poison = Poison(memory)
    at = data.draw(st.integers(0, count - 1)) * item_size
    before = memory[at : at + item_size].copy()
    memory[:] = ~memory
    memory[at : at + item_size] = before
    assert poison.left(item_size) == 1
