"""Batches, streams, coroutines, and requests of plain clients, in the test's own process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.memory.managed import ManagedRegion
from shm_backend_utils.memory.registrations import Registration
from shm_backend_utils.model import BatchCall, Call, ShmSession, StreamCall
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.mapping.mapped import PATIENCE_S
from shm_backend_utils.protocol import results
from shm_backend_utils.protocol.claims import LentRegionClaim
from shm_backend_utils.protocol.spans import InputSpan, OutputSpan, Ring, Table, frame_number
from tests.unit.fake_backend import Request
from tests.unit.sessions import session_of, tensor
from tests.unit.table_client import Client

FP32 = BY_NAME["FP32"]
X = np.arange(4, dtype=np.float32)
SHM = Path("/dev/shm")

Open = Callable[..., ShmSession]


@pytest.fixture
def open_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[Any] = []

    def open_session(inputs: Any = None, outputs: Any = None, **more: Any) -> ShmSession:
        manager = session_of(monkeypatch, inputs or [tensor("X")], outputs or [tensor("Y")], **more)
        opened.append(manager)
        return manager.__enter__()

    yield open_session
    for manager in opened:
        manager.__exit__(None, None, None)


def double(call: Call) -> None:
    x = call.input("X")
    np.multiply(x.numpy(), 2, out=call.output("Y", x.shape, x.dtype).numpy())


# Plain clients


def test_a_plain_request_is_served_by_the_same_code(open_session: Open) -> None:
    paths: list[str] = []

    def infer(call: Call) -> None:
        paths.append(call.path)
        double(call)

    (response,) = open_session().serve([Request("", ["Y"], {"X": X})], infer)
    assert response.error is None
    assert (response.tensors["Y"].tolist(), paths) == ([0, 2, 4, 6], ["triton"])


def test_what_a_plain_request_brings_is_read_only(open_session: Open) -> None:
    flags: list[bool] = []

    def infer(call: Call) -> None:
        view = call.input("X")
        flags.extend([view.writable, view.numpy().flags.writeable, view.array.flags.writeable])
        flags.append(X.flags.writeable)
        double(call)

    open_session().serve([Request("", ["Y"], {"X": X})], infer)
    assert flags == [False, False, False, True]


def test_what_is_passed_on_leaves_as_it_came(open_session: Open) -> None:
    session = open_session()
    (response,) = session.serve([Request("", ["Y"], {"X": X})], lambda call: call.put("Y", call.input("X")))
    assert response.tensors["Y"].tolist() == X.tolist()


def test_strings_of_a_plain_request(open_session: Open) -> None:
    session = open_session([tensor("X", "STRING")], [tensor("Y", "STRING")])
    texts = np.array([b"a", b"bc"], object)

    def infer(call: Call) -> None:
        call.put("Y", [text.upper() for text in call.input("X").strings()])

    (response,) = session.serve([Request("", ["Y"], {"X": texts})], infer)
    assert response.tensors["Y"].tolist() == [b"A", b"BC"]


def test_a_plain_request_asks_for_what_it_uses_alone(open_session: Open) -> None:
    asked: list[str] = []

    class Watched(Request):
        def parameters(self) -> str:
            asked.append("parameters")
            return super().parameters()

        def inputs(self) -> Any:
            asked.append("inputs")
            return super().inputs()

        def requested_output_names(self) -> list[str]:
            asked.append("outputs")
            return super().requested_output_names()

    session = open_session()
    session.serve([Watched("", ["Y"], {"X": X})], double)
    assert asked == ["parameters", "inputs", "outputs"]


def test_parameters_of_a_plain_request(open_session: Open) -> None:
    seen: list[Any] = []

    def infer(call: Call) -> None:
        seen.append(call.parameters)
        double(call)

    session = open_session()
    session.serve([Request({"note": "a", "count": 2}, ["Y"], {"X": X}), Request("", ["Y"], {"X": X})], infer)
    assert seen == [{"note": "a", "count": 2}, {}]


def test_a_model_may_serve_the_direct_path_alone(open_session: Open) -> None:
    session = open_session(parameters={"SHM_PATHS": "direct"})
    (response,) = session.serve([Request("", ["Y"], {"X": X})], double)
    assert str(response.error).startswith("shm:table: shm_slot: found nothing, expected the address of a slot: ")


def test_a_model_may_not_serve_the_direct_path(open_session: Open) -> None:
    client = Client()
    session = open_session(parameters={"SHM_PATHS": "inline"})
    (response,) = session.serve([client.request({"X": X}, {"Y": 16})], double)
    assert "model 'm' does not serve the direct path" in str(response.error)
    client.close()


# Batches


def batched(open_session: Open, **more: Any) -> ShmSession:
    carrier = tensor("SHM", "UINT8")
    return open_session([tensor("X", dims=[-1]), carrier], [tensor("Y", dims=[-1])], max_batch_size=8, **more)


def carrier_of(rows: int) -> dict[str, Any]:
    return {"SHM": np.empty((rows, 0), np.uint8)}


def rows_side_by_side(client: Client, counts: list[int], width: int = 4) -> list[Request]:
    """Return requests whose rows follow one another in memory, and so do their outputs."""
    requests = []
    begin = client.data
    total = sum(counts)
    first = 0
    for slot, count in enumerate(counts):
        at, size = begin + first * width * 4, count * width * 4
        np.ndarray((count, width), np.float32, client.region.bytes(), at)[...] = slot + 1
        said = Table(
            {"X": InputSpan(FP32, (count, width), 0, at, size)}, {"Y": OutputSpan(0, at + total * width * 4, size)}
        )
        requests.append(Request(client.begin(said, slot), ["Y"], carrier_of(count)))
        first += count
    return requests


def double_batch(seen: list[Any]) -> Callable[[BatchCall], None]:
    def infer(batch: BatchCall) -> None:
        x = batch.input("X")
        y = batch.output("Y", x.shape[1:], x.dtype)
        seen.append((batch.size, batch.gathered_bytes, x.path, y.path))
        np.multiply(x.numpy(), 2, out=y.numpy())

    return infer


def test_rows_that_follow_one_another_are_one_view(open_session: Open) -> None:
    client, seen = Client(slots=3), []  # type: ignore[var-annotated]
    responses = batched(open_session).serve_batch(rows_side_by_side(client, [1, 2, 3]), double_batch(seen))
    assert [response.error for response in responses] == [None] * 3
    assert seen == [(6, 0, "direct", "direct")]
    for slot in range(3):
        assert client.output("Y", slot).tolist() == [[2 * slot + 2] * 4] * (slot + 1)
        assert client.is_over(slot)
    client.close()


def test_rows_are_sorted_by_where_they_lie(open_session: Open) -> None:
    client, seen = Client(slots=3), []  # type: ignore[var-annotated]
    requests = rows_side_by_side(client, [1, 2, 3])
    responses = batched(open_session).serve_batch(requests[::-1], double_batch(seen))
    assert [response.error for response in responses] == [None] * 3
    assert seen == [(6, 0, "direct", "direct")]
    client.close()


def test_rows_that_lie_apart_are_copied_once(open_session: Open) -> None:
    client, seen = Client(slots=2), []  # type: ignore[var-annotated]
    requests = [
        client.request({"X": np.full((2, 4), slot + 1, np.float32)}, {"Y": 32}, slot, delivered=carrier_of(2))
        for slot in range(2)
    ]
    batched(open_session).serve_batch(requests, double_batch(seen))
    assert seen == [(4, 64, "triton", "triton")]
    for slot in range(2):
        assert client.output("Y", slot).tolist() == [[2 * slot + 2] * 4] * 2
    client.close()


def test_nothing_of_a_batch_is_kept(open_session: Open) -> None:
    session = batched(open_session)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(15):
        client, seen = Client(slots=2), []  # type: ignore[var-annotated]
        session.serve_batch(rows_side_by_side(client, [1, 1]), double_batch(seen))
        assert seen[0][1] == 0
        client.close()
    resolver = session._open_context().resolver
    resolver.sweep()
    assert resolver.registry.mapped() == (0, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_plain_requests_and_others_make_one_batch(open_session: Open) -> None:
    client, seen = Client(), []  # type: ignore[var-annotated]
    direct = client.request({"X": np.ones((1, 4), np.float32)}, {"Y": 16}, delivered=carrier_of(1))
    plain = Request("", ["Y"], {"X": np.full((2, 4), 3, np.float32)})
    first, second = batched(open_session).serve_batch([plain, direct], double_batch(seen))
    assert first.tensors["Y"].tolist() == [[6] * 4] * 2
    assert second.error is None
    assert client.output("Y").tolist() == [[2] * 4]
    assert seen[0][0] == 3
    client.close()


def test_requests_of_other_shapes_are_batches_of_their_own(open_session: Open) -> None:
    client, seen = Client(slots=2), []  # type: ignore[var-annotated]
    requests = [
        client.request({"X": np.ones((1, width), np.float32)}, {"Y": 64}, slot, delivered=carrier_of(1))
        for slot, width in enumerate((4, 5))
    ]
    responses = batched(open_session).serve_batch(requests, double_batch(seen))
    assert [response.error for response in responses] == [None, None]
    assert [size for size, *_ in seen] == [1, 1]
    client.close()


@pytest.mark.parametrize("carried", [1, 3, None])
def test_a_batch_size_that_triton_was_not_told_is_refused(open_session: Open, carried: int | None) -> None:
    client = Client()
    delivered = {} if carried is None else carrier_of(carried)
    request = client.request({"X": np.ones((2, 4), np.float32)}, {"Y": 32}, delivered=delivered)
    (response,) = batched(open_session).serve_batch([request], lambda batch: None)
    assert "tensor 'X' has a batch of 2, but the request has" in str(response.error)
    assert client.is_free()
    client.close()


def test_a_request_without_inputs_fails_alone(open_session: Open) -> None:
    client, seen = Client(slots=2), []  # type: ignore[var-annotated]
    good = client.request({"X": np.ones((1, 4), np.float32)}, {"Y": 16}, delivered=carrier_of(1))
    empty = client.request({}, {"Y": 16}, 1)
    first, second = batched(open_session).serve_batch([empty, good], double_batch(seen))
    assert str(first.error).startswith("shm:missing: ")
    assert second.error is None
    assert client.is_over(1)
    client.close()


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_what_a_batch_raises_completes_every_slot(open_session: Open, kind: type[BaseException]) -> None:
    client = Client(slots=2)

    def infer(batch: BatchCall) -> None:
        raise kind("no")

    responses = batched(open_session).serve_batch(rows_side_by_side(client, [1, 1]), infer)
    assert all(kind.__name__ in str(response.error) for response in responses)
    assert client.is_over(0)
    assert client.is_over(1)
    client.close()


# Coroutines


def test_requests_are_served_side_by_side_on_the_event_loop(open_session: Open) -> None:
    client = Client(slots=2)
    session = open_session()
    meeting = asyncio.Event()

    async def infer(call: Call) -> None:
        if call.parameters.get("first"):
            await meeting.wait()
        meeting.set()
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, 0, first=True), client.request({"X": X + 1}, {"Y": 16}, 1)]
    responses = asyncio.run(session.serve_async(requests, infer))
    assert [response.error for response in responses] == [None, None]
    assert client.output("Y", 1).tolist() == [2, 4, 6, 8]
    assert client.is_over(0)
    client.close()


def test_a_coroutine_that_is_cancelled_fails_alone(open_session: Open) -> None:
    client = Client(slots=2)

    async def infer(call: Call) -> None:
        if call.parameters.get("fail"):
            raise asyncio.CancelledError
        await asyncio.sleep(0.01)
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, 0, fail=True), client.request({"X": X}, {"Y": 16}, 1)]
    first, second = asyncio.run(open_session().serve_async(requests, infer))
    assert "CancelledError" in str(first.error)
    assert second.error is None
    assert client.is_over(0)
    assert client.is_over(1)
    client.close()


def test_a_slot_that_is_busy_does_not_hold_the_event_loop(open_session: Open) -> None:
    client = Client(slots=2)
    assert client.region.lease(0).take()
    done: list[float] = []

    async def infer(call: Call) -> None:
        done.append(time.monotonic())
        double(call)

    requests = [client.request({"X": X}, {"Y": 16}, slot) for slot in range(2)]
    begin = time.monotonic()
    first, second = asyncio.run(open_session().serve_async(requests, infer))
    assert str(first.error).startswith("shm:busy: ")
    assert second.error is None
    assert done[0] - begin < PATIENCE_S
    client.region.lease(0).give_back()
    client.close()


# Streams


def streaming(open_session: Open, **more: Any) -> ShmSession:
    return open_session(model_transaction_policy={"decoupled": True}, **more)


def frame(client: Client, slot: int, index: int, generation: int = 1) -> list[float] | None:
    """Return what lies in a place of a ring, if it is that frame."""
    if client.region.record(slot).completed != frame_number(generation, index):
        return None
    (place,) = results.decode(client.region.record(slot).copy_results(), [client.region.header.byte_size]).outputs
    view: Any = np.ndarray(place.shape, place.dtype.numpy, client.region.bytes(), place.offset)
    return [float(value) for value in view]


def test_frames_go_round_as_the_client_releases_them(open_session: Open) -> None:
    client = Client(slots=3)
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(1, 2, 1024))
    seen: list[Any] = []

    def release() -> None:
        for index in range(5):
            slot = 1 + index % 2
            deadline = time.monotonic() + 10
            while (found := frame(client, slot, index)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            seen.append(found)
            client.region.record(slot).generation = frame_number(1, index)

    reader = threading.Thread(target=release)
    reader.start()

    def answer(call: StreamCall) -> Iterator[None]:
        for index in range(5):
            call.output("Y", (4,), np.float32).numpy()[:] = call.input("X").numpy() + index
            yield

    streaming(open_session).serve_streams([request], answer)
    reader.join()
    assert seen == [[index, index + 1, index + 2, index + 3] for index in range(5)]
    assert client.is_over()
    assert [None if sent is None else (sent.error, sent.tensors) for sent in request.sender.sent] == [
        *[(None, {})] * 5,
        None,
    ]
    client.close()


def test_without_a_ring_responses_go_through_triton(open_session: Open) -> None:
    client = Client()
    request = client.request({"X": X}, {"Y": 16})

    def answer(call: StreamCall) -> Iterator[None]:
        for _ in range(2):
            call.put("Y", call.input("X"))
            yield

    streaming(open_session).serve_streams([request], answer)
    assert [sent.tensors["Y"].tolist() for sent in request.sender.sent[:-1] if sent] == [X.tolist()] * 2
    assert client.is_over()
    client.close()


@pytest.mark.parametrize("ring", [Ring(0, 2, 1024), Ring(2, 2, 1024), Ring(1, 3, 1024)], ids=str)
def test_a_ring_of_slots_that_are_not_there_is_refused(open_session: Open, ring: Ring) -> None:
    client = Client(slots=3)
    request = client.request({"X": X}, {"Y": 16}, ring=ring)
    streaming(open_session).serve_streams([request], lambda call: None)
    (sent,) = request.sender.sent
    assert sent is not None
    assert str(sent.error).startswith("shm:table: frame_slot: found slots ")
    assert client.is_free()
    client.close()


def test_a_client_that_releases_nothing_is_not_waited_for_without_end(open_session: Open) -> None:
    client = Client(slots=2)
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(1, 1, 1024))

    def answer(call: StreamCall) -> Iterator[None]:
        while True:
            call.put("Y", X)
            yield

    streaming(open_session, parameters={"SHM_STREAM_PATIENCE_S": "0.05"}).serve_streams([request], answer)
    last = request.sender.sent[-1]
    assert last is not None
    assert str(last.error).startswith("shm:stalled: ")
    assert client.is_over()
    client.close()


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_what_a_stream_raises_is_its_last_response(open_session: Open, kind: type[BaseException]) -> None:
    client = Client(slots=2)
    request = client.request({"X": X}, {"Y": 16}, ring=Ring(1, 1, 1024))

    def answer(call: StreamCall) -> None:
        raise kind("no")

    streaming(open_session).serve_streams([request], answer)
    (sent,) = request.sender.sent
    assert sent is not None
    assert f"{kind.__name__}: no" in str(sent.error)
    assert client.is_over()
    client.close()


# Registered regions


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Registration]]:
    found: dict[str, Registration] = {}
    monkeypatch.setattr(policy, "fetch_registrations", lambda url: found)
    yield found
    for registration in found.values():
        (SHM / registration.key).unlink(missing_ok=True)


def file_of(byte_size: int = 4096) -> str:
    key = f"foreign-{os.getpid()}-{secrets.token_hex(8)}"
    (SHM / key).write_bytes(bytes(byte_size))
    return key


def descriptor(inputs: Any, outputs: Any, *names: str) -> dict[str, str]:
    regions = [{"kind": "named", "name": name} for name in names]
    return {"shm_io": json.dumps({"v": 1, "model": "m", "regions": regions, "inputs": inputs, "outputs": outputs})}


def test_registered_regions_are_named_by_a_descriptor(open_session: Open, registered: dict[str, Registration]) -> None:
    key = file_of()
    registered["mine"] = Registration(key, 64, 1024)
    file = np.memmap(SHM / key, np.float32, "r+")
    file[16:20] = [1, 2, 3, 4]
    request = Request(descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [0, 256, 16]}, "mine"), ["Y"])
    session = open_session()
    for _ in range(2):
        (response,) = session.serve([request], double)
        assert (response.error, response.tensors) == (None, {})
        assert file[80:84].tolist() == [2, 4, 6, 8]
    # What is passed on must be copied: no results tell where it is.
    session.serve([request], lambda call: call.put("Y", call.input("X")))
    assert file[80:84].tolist() == [1, 2, 3, 4]


def test_two_names_may_stand_for_two_parts_of_one_object(
    open_session: Open, registered: dict[str, Registration]
) -> None:
    key = file_of()
    registered["in"], registered["out"] = Registration(key, 0, 64), Registration(key, 64, 64)
    file = np.memmap(SHM / key, np.float32, "r+")
    file[:4] = 3
    said = descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [1, 0, 16]}, "in", "out")
    (response,) = open_session().serve([Request(said, ["Y"])], double)
    assert response.error is None
    assert file[16:20].tolist() == [6] * 4


def test_two_names_of_the_same_bytes_do_not_hide_an_overlap(
    open_session: Open, registered: dict[str, Registration]
) -> None:
    key = file_of()
    registered["in"], registered["out"] = Registration(key, 0, 64), Registration(key, 8, 64)
    said = descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [1, 0, 16]}, "in", "out")
    (response,) = open_session().serve([Request(said, ["Y"])], double)
    assert str(response.error) == "shm:table: outputs.Y: found bytes of another tensor, expected bytes of its own"


def test_a_registration_whose_offset_is_odd_makes_its_tensors_odd(
    open_session: Open, registered: dict[str, Registration]
) -> None:
    registered["mine"] = Registration(file_of(), 2, 1024)
    said = descriptor({"X": [0, 0, 16, "FP32", [4]]}, {}, "mine")
    (response,) = open_session().serve([Request(said, ["Y"])], double)
    assert str(response.error).startswith("shm:table: inputs.X.offset: found 0, expected a place at a multiple of 4")


def test_spans_beyond_what_is_registered_are_refused(open_session: Open, registered: dict[str, Registration]) -> None:
    registered["mine"] = Registration(file_of(), 0, 15)
    said = descriptor({"X": [0, 0, 16, "FP32", [4]]}, {}, "mine")
    (response,) = open_session().serve([Request(said, ["Y"])], double)
    assert str(response.error).startswith("shm:table: inputs.X: found 16 bytes at offset 0")


def test_a_file_that_was_replaced_is_asked_for_anew(open_session: Open, registered: dict[str, Registration]) -> None:
    old, new = file_of(), file_of()
    registered["mine"] = Registration(old, 0, 4096)
    said = descriptor({"X": [0, 0, 16, "FP32", [4]]}, {"Y": [0, 256, 16]}, "mine")
    session = open_session()
    session.serve([Request(said, ["Y"])], double)
    (SHM / old).unlink()
    registered["mine"] = Registration(new, 0, 4096)
    file = np.memmap(SHM / new, np.float32, "r+")
    file[:4] = 5
    session.serve([Request(said, ["Y"])], double)
    assert file[64:68].tolist() == [10] * 4


# Memory that another model has lent


def lent(client: Client, slot: int = 0, **changes: Any) -> LentRegionClaim:
    header = client.region.header
    fields = {
        "key": client.region.segment.key,
        "byte_size": header.byte_size,
        "token": header.token.hex(),
        "slot": slot,
        **changes,
    }
    return LentRegionClaim(**fields)


def borrowing(lender: Client, client: Client, **changes: Any) -> Request:
    """Return a lender's request whose tensors lie in its client's region."""
    at = client.data
    np.ndarray((4,), np.float32, client.region.bytes(), at)[...] = X
    said = Table({"X": InputSpan(FP32, (4,), 1, at, 16)}, {"Y": OutputSpan(1, at + 64, 16)}, (lent(client, **changes),))
    return Request(lender.begin(said), ["Y"])


def test_lent_memory_is_used_and_held(open_session: Open) -> None:
    lender, client = Client(), Client()
    held: list[bool] = []

    def infer(call: Call) -> None:
        held.append(client.is_free())
        double(call)

    (response,) = open_session().serve([borrowing(lender, client)], infer)
    assert response.error is None
    assert (held, client.is_free(), client.region.record(0).completed) == ([False], True, 0)
    place = lender.places(byte_sizes=[client.region.header.byte_size])["Y"]
    assert (place.region, place.offset) == (1, client.data + 64)
    assert lender.is_over()
    for each in (lender, client):
        each.close()


def test_memory_that_the_client_takes_back_is_not_borrowed(open_session: Open) -> None:
    lender, client = Client(), Client()
    assert client.region.lease(0).take_back()
    (response,) = open_session().serve([borrowing(lender, client)], double)
    assert str(response.error).startswith("shm:stale: the client takes back the memory")
    assert lender.is_free()
    assert lender.region.record(0).started == 0
    client.region.lease(0).give_back()
    for each in (lender, client):
        each.close()


def test_a_lender_that_is_gone_has_lent_nothing(open_session: Open) -> None:
    lender, client = Client(), Client()
    request = borrowing(lender, client)
    session = open_session()
    fresh = ManagedRegion.open(lender.region.segment.key, lender.region.header.token.hex(), "region")
    lender.region.close()  # as if its process had died: the name is there, the owner's lease is not
    (response,) = session.serve([request], double)
    assert str(response.error).startswith("shm:stale: the model that has lent")
    assert fresh.record(0).started == 0
    assert client.is_free()
    fresh.segment.unlink()
    fresh.close()
    client.close()


@pytest.mark.parametrize("changes", [{"slot": 1}, {"byte_size": 100_000_000}, {"byte_size": 8192}], ids=str)
def test_lent_memory_that_is_not_as_claimed_is_refused(open_session: Open, changes: dict[str, Any]) -> None:
    lender, client = Client(), Client()
    (response,) = open_session().serve([borrowing(lender, client, **changes)], double)
    assert str(response.error).startswith("shm:table: ")
    for each in (lender, client):
        assert each.is_free()
        each.close()


def test_records_of_lent_regions_are_no_data(open_session: Open) -> None:
    lender, client = Client(), Client()
    said = Table({"X": InputSpan(FP32, (4,), 1, 4096, 16)}, {}, (lent(client),))
    (response,) = open_session().serve([Request(lender.begin(said), ["Y"])], double)
    assert str(response.error).startswith("shm:table: inputs.X: found 16 bytes at offset 4096")
    for each in (lender, client):
        each.close()


def test_the_slots_own_region_is_not_lent_as_well(open_session: Open) -> None:
    client = Client()
    begin = time.monotonic()
    (response,) = open_session().serve([borrowing(client, client)], double)
    assert str(response.error) == (
        "shm:table: regions[1]: found memory that the request names before, expected every region once"
    )
    assert time.monotonic() - begin < 0.5
    assert client.is_free()
    client.close()
