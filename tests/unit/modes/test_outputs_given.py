"""Requests of plain clients, and where an output of model.py goes: what fits, and what must not be written at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BYTES
from shm_backend_utils.errors import ClosedError, MissingTensorError, ModelError
from shm_backend_utils.model import Call
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.protocol.results import OutputPlace
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Table
from shm_backend_utils.tensors.strings import Strings
from shm_backend_utils.tensors.view import StringsView
from shm_backend_utils.testing.emulator.request import InferenceRequest
from tests.unit.emulated import delivered, error_of, message_of, outputs_of
from tests.unit.modes.conftest import FP32, Open, X
from tests.unit.sessions import double, tensor
from tests.unit.table_client import Client

Infer = Callable[[Call], Any]
WORDS = [b"ab", b"cde"]
PACKED = b"\2\0\0\0ab\3\0\0\0cde"


def serve(open_session: Open, request: InferenceRequest, infer: Infer, outputs: Any = None, inputs: Any = None) -> Any:
    (response,) = open_session(inputs, outputs).serve([request], infer)
    return response


def place_after(open_session: Open, client: Client, infer: Infer, room: int = 16, **more: Any) -> OutputPlace:
    response = serve(open_session, client.request({"X": X}, {"Y": room}), infer, **more)
    assert response.error() is None
    return client.places()["Y"]


def test_the_table_counts_before_tensors_and_a_transposed_output_is_copied(open_session: Open, client: Client) -> None:
    request = client.request({"X": X}, {"Y": 16}, delivered={"X": X + 100})
    assert serve(open_session, request, double).error() is None
    assert client.output("Y").tolist() == [0, 2, 4, 6]

    def infer(call: Call) -> None:
        y = call.output("Y", (2, 2), np.float32).numpy()
        y[:] = [[1, 2], [3, 4]]
        call.put("Y", y.T)

    place_after(open_session, client, infer, outputs=[tensor("Y", dims=[-1, -1])])
    assert client.output("Y").tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize("shape", [(2,), (2, 2), ()])
def test_an_output_of_another_shape_than_the_models_is_refused(
    open_session: Open, client: Client, shape: tuple[int, ...]
) -> None:
    request = client.request({"X": X}, {"Y": 16})
    infer: Infer = lambda call: call.output("Y", shape, np.float32)  # noqa: E731
    assert "'Y' has shape" in message_of(serve(open_session, request, infer, outputs=[tensor("Y", dims=[4])]))


def test_room_for_an_output_that_is_not_wanted_stays_unused(open_session: Open, client: Client) -> None:
    def infer(call: Call) -> None:
        for number, name in enumerate("ZY", 1):
            call.put(name, np.multiply(X, number, out=buffer))  # which may be written again

    buffer = np.empty_like(X)
    said = client.laid_out({"X": X}, {"Y": 16, "W": 16})
    before = client.region.bytes().tobytes()[said.outputs["W"].offset :]
    response = serve(open_session, delivered(client.begin(said), ["Y", "Z"]), infer, [*map(tensor, "YZW")])
    assert set(client.places()) == {"Y", "Z"}
    assert {name: array.tolist() for name, array in outputs_of(response).items()} == {"Z": X.tolist()}
    assert client.output("Y").tolist() == [0, 2, 4, 6]
    assert client.region.bytes().tobytes()[said.outputs["W"].offset :] == before


def test_an_output_one_byte_larger_than_its_room_goes_back_through_triton(open_session: Open, client: Client) -> None:
    given = np.arange(16, dtype=np.uint8)
    for ways in (lambda call: call.put("Y", given), lambda call: call.output("Y", (16,), "u1").numpy().fill(1)):
        region = client.region.bytes()
        region[client.data + 256 :] = 77
        place = place_after(open_session, client, ways, room=15, outputs=[tensor("Y", "UINT8")])
        assert place.is_in_response
        assert (region[client.data + 256 :] == 77).all()
        assert not place_after(open_session, client, ways, room=16, outputs=[tensor("Y", "UINT8")]).is_in_response


def test_an_input_that_is_put_is_passed_through_from_first_byte_to_last(open_session: Open, client: Client) -> None:
    def put(call: Call) -> None:
        x = call.input("X")
        assert np.shares_memory(call.to_host(x), x.numpy())
        call.put("Y", x)

    place = place_after(open_session, client, put)
    assert (place.offset, place.byte_size) == (client.data, 16)
    place = place_after(open_session, client, lambda call: call.put("Y", call.input("X").numpy()[1:]))
    assert (place.offset, place.byte_size) == (client.data + 4, 12)
    other, kept = Client(), []
    serve(open_session, other.request({"X": X + 1}, {}), lambda call: kept.append(call.input("X")))
    other.close()
    copied = client.data + 256
    assert place_after(open_session, client, lambda call: call.put("Y", kept[0])).offset == copied, "another request's"

    def reach_beyond(call: Call) -> None:
        call.put("Y", np.lib.stride_tricks.as_strided(call.input("X").numpy(), (5,)))

    assert place_after(open_session, client, reach_beyond, room=20).offset == copied


@pytest.mark.parametrize("output", [tensor("Y", dims=[-1, -1]), tensor("Y", dims=[3]), tensor("Y", "INT32")], ids=str)
def test_an_unfit_input_is_not_passed_through(open_session: Open, client: Client, output: dict[str, Any]) -> None:
    request = client.request({"X": X}, {"Y": 16})
    response = serve(open_session, request, lambda call: call.put("Y", call.input("X")), [output])
    assert "model.py wrote an invalid output: " in message_of(response)


def test_an_input_is_not_passed_through_if_the_client_wants_no_memory_used(open_session: Open, client: Client) -> None:
    said = Table({"X": InputSpan(FP32, (4,), 0, client.data, 16)}, {})
    np.ndarray((4,), np.float32, client.region.bytes(), client.data)[:] = X
    request = delivered(client.begin(said), ["Y"])
    response = serve(open_session, request, lambda call: call.put("Y", call.input("X")))
    assert client.places()["Y"].is_in_response
    assert outputs_of(response)["Y"].tolist() == X.tolist()


def test_a_clients_strings_are_passed_on_to_outputs_of_strings_alone(open_session: Open, client: Client) -> None:
    inputs = [tensor("X"), tensor("WORDS_IN", "STRING")]
    outputs = [tensor("Y"), tensor("WORDS", "STRING", dims=[-1, -1])]

    def infer(call: Call) -> None:
        words = call.input("WORDS_IN")
        assert isinstance(words, StringsView)
        for given in (words, words.strings()):
            for name, match in (("Y", "is BYTES"), ("Z", "'Z'"), ("WORDS", "has shape")):
                with pytest.raises(ModelError, match=match):
                    call.put(name, given)
        with pytest.raises(ModelError, match=r"'WORDS' holds strings, .*; use call.put\(name, strings\)"):
            call.output("WORDS", (2, 2), object)
        call.put("Y", X)

    request = client.request({"X": X}, {"Y": 16}, delivered={"WORDS_IN": np.array(WORDS, object)})
    assert serve(open_session, request, infer, outputs, inputs).error() is None


@pytest.mark.parametrize("room", [len(PACKED) - 1, len(PACKED), len(PACKED) + 1])
def test_strings_are_written_where_they_fit_to_the_byte(open_session: Open, client: Client, room: int) -> None:
    region = client.region.bytes()
    region[client.data :] = 77
    outputs = [tensor("Y", "STRING")]
    place = place_after(open_session, client, lambda call: call.put("Y", WORDS), room=room, outputs=outputs)
    assert place.is_in_response == (room < len(PACKED))
    begin = client.data + 256
    if not place.is_in_response:
        assert bytes(region[begin : begin + len(PACKED)]) == PACKED
        begin += len(PACKED)
    assert (region[begin:] == 77).all()


@pytest.mark.parametrize("room", [0, 100])
def test_an_array_of_strings_may_be_overwritten_when_it_was_put(open_session: Open, client: Client, room: int) -> None:
    def infer(call: Call) -> None:
        for name in ("Y", "Z"):
            work[...] = name
            call.put(name, work)
        work[...] = "later"

    work = np.empty(2, object)
    request = client.request({"X": X}, {"Y": room, "Z": room})
    response = serve(open_session, request, infer, [tensor("Y", "STRING"), tensor("Z", "STRING")])
    for name in ("Y", "Z"):
        place = client.places()[name]
        data = client.region.bytes()[place.offset :] if room else outputs_of(response)[name]
        assert Strings.encoded_as(name, data, (2,)).numpy().tolist() == [name.encode()] * 2


@pytest.mark.parametrize("rooms", [{}, {"Y": OutputSpan(0, 4096 + 4096 + 256, 64)}])
def test_lying_strings_are_not_passed_on(open_session: Open, client: Client, rooms: dict[str, OutputSpan]) -> None:
    client.region.bytes()[client.data : client.data + 8] = [200, 0, 0, 0, 1, 2, 3, 4]
    said = Table({"X": InputSpan(BYTES, (2,), 0, client.data, 8)}, rooms)
    request = delivered(client.begin(said), ["Y"])
    inputs, outputs = [tensor("X", "STRING")], [tensor("Y", "STRING")]

    def infer(call: Call) -> None:
        call.put("Y", call.input("X").strings())

    response = serve(open_session, request, infer, outputs, inputs)
    is_refused = "model.py wrote an invalid output" in message_of(response)
    assert is_refused != bool(rooms)  # where there is room, it is told where it wrote them itself
    assert client.is_over()


@pytest.mark.parametrize(("shape", "fits"), [((1,), True), ((1, 1), False)])
def test_results_fill_the_record_only(open_session: Open, client: Client, shape: tuple[int, ...], fits: bool) -> None:
    name = "Y" * (2048 - 16 - 8 - 24 - 8)
    said = Table({}, {name: OutputSpan(0, client.data, 16)})
    request = delivered(client.begin(said), [name])
    outputs = [tensor(name, dims=[-1] * len(shape))]
    response = serve(open_session, request, lambda call: call.put(name, np.ones(shape, "f4")), outputs)
    assert (response.error() is None) == fits
    assert fits or "results of 2040 bytes for 1 outputs" in message_of(response)
    assert client.is_over()


def test_a_delivered_tensor_is_an_input_by_the_configuration_of_the_type_that_triton_says(open_session: Open) -> None:
    found: list[Any] = []

    def infer(call: Call) -> None:
        x = call.input("X")
        found.extend([x.triton_dtype, x.numpy().tolist()])
        with pytest.raises(ModelError, match="^model.py asked for input 'Z'; the model has X"):
            call.find_input("Z")
        double(call)

    assert error_of(open_session([tensor("X", "UNHEARD_OF")]), delivered({}, ["Y"], {"X": X, "Z": X}), infer) == ""
    assert found == ["FP32", X.tolist()]


DESCRIPTOR = {"v": 1, "model": "m", "regions": [], "inputs": {}, "outputs": {}}


def test_delivered_tensors_count_and_are_passed_on_as_they_are(
    open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"shm_io": json.dumps({**DESCRIPTOR, "model": "another"})}
    (response,) = open_session().serve([delivered(said, ["Y"], {"X": X})], double)
    assert outputs_of(response)["Y"].tolist() == (X * 2).tolist()
    assert "is for another model" in error_of(open_session(), delivered(said, ["Y"]), double)
    monkeypatch.delattr(TritonBackend, "input")
    (response,) = open_session().serve([delivered({}, ["Y"], {"X": X})], lambda call: call.put("Y", call.input("X")))
    assert outputs_of(response)["Y"].tolist() == X.tolist()


def test_a_model_that_does_not_serve_the_path_takes_nothing_by_it(open_session: Open, client: Client) -> None:
    session = open_session(parameters={"SHM_PATHS": "triton-shm"})
    named = delivered({"shm_io": json.dumps(DESCRIPTOR)}, ["Y"], {"X": X})
    for name, request in (("shm_io", named), ("shm_slot", client.request({"X": X}, {"Y": 16}))):
        assert f"{name}: found a value, expected none" in error_of(session, request, double)
    found = error_of(open_session(parameters={"SHM_PATHS": "direct"}), delivered({}, ["Y"], {"X": X}), double)
    assert found.startswith("shm:table: shm_slot: found nothing, expected the address of a slot: ")


def test_rows_are_compared_with_the_carrier_where_there_are_batches_alone(open_session: Open, client: Client) -> None:
    assert error_of(open_session(), client.request({"X": X}, {"Y": 16}), double) == ""
    batched = {"inputs": [tensor("X"), tensor("SHM", "UINT8")], "max_batch_size": 4}
    x = np.ones((2, 2), np.float32)
    for rows, error in ((None, "the request has none"), (3, "the request has one of 3"), (2, "")):
        delivered = {} if rows is None else {"SHM": np.empty((rows, 0), np.uint8)}
        request = client.request({"X": x}, {"Y": 16}, delivered=delivered)
        found = error_of(open_session(**batched), request, double)
        assert error in found
        assert bool(error) == bool(found)


def test_a_call_that_is_over_gives_nothing(open_session: Open, client: Client) -> None:
    calls: list[Call] = []

    def infer(call: Call) -> None:
        with pytest.raises(MissingTensorError):
            call.input("Z")
        assert call.find_input("Z") is None
        calls.append(call)
        double(call)

    inputs = [tensor("X"), tensor("Z")]
    open_session(inputs).serve([client.request({"X": X}, {"Y": 16})], infer)
    (call,) = calls
    for use in (
        lambda: call.input("X"),
        lambda: call.find_input("X"),
        lambda: call.find_input("Z"),
        lambda: call.inputs,
        lambda: call.output("Y", (4,), np.float32),
        lambda: call.put("Y", X),
        lambda: call.forward("m", {}),
        lambda: call.ready_on(1),
        lambda: call.response_parameters,
    ):
        with pytest.raises(ClosedError, match="this call"):
            use()
