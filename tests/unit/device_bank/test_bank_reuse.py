"""A region with device memory serves its next call when the GPU has finished with the last one."""

from __future__ import annotations

import threading
import time

import pytest
from shm_backend_utils.memory.cuda.events import Event, EventListener, EventRecorder
from tests.unit.fake_gpu_events import PATIENCE_S, live_events, live_streams, unfinished_work

from shm_backend_utils.client.errors import DeadlineExceededError, PoolExhaustedError
from shm_backend_utils.client.paths.direct import DirectExchange, wait_for_models
from shm_backend_utils.errors import PeerError
from shm_backend_utils.memory.pool.slot import SlotRegion
from shm_backend_utils.protocol import results, table
from shm_backend_utils.protocol.results import NO_RESULTS
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda
from tests.unit.device_bank.bank_calls import SHM, MakeRegion, pool_and_opening, times


def leave_events(exchange: DirectExchange, *events: Event) -> SlotRegion:
    """End a call's request as a model does whose GPU goes on; the call is over."""
    slot, region = exchange._slot, exchange._region
    slot.record.complete(slot.begin(table.encode(exchange._table)), results.encode((), events))
    exchange.close()
    return region


def test_a_region_is_used_again_when_the_models_gpu_has_finished(cuda: FakeCuda) -> None:
    model = FakeCuda()
    recorder = EventRecorder(model)
    done: list[str] = []
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)

        def call_next() -> None:
            again = calls.open(A=0)
            done.append("the next call" if again._region is region else "another region")
            again.close()

        with unfinished_work(model, done) as finish:
            region = leave_events(exchange, recorder.record(0))
            waiting = threading.Thread(target=call_next)
            waiting.start()
            finish.set()
            waiting.join(PATIENCE_S)
    assert done == ["work", "the next call"]


def test_a_call_waits_for_a_models_gpu_no_longer_than_it_may(cuda: FakeCuda) -> None:
    model = FakeCuda()
    recorder = EventRecorder(model)
    done: list[str] = []
    with pool_and_opening(cuda) as calls, unfinished_work(model, done):
        region = leave_events(calls.open(A=0), recorder.record(0))
        with pytest.raises(DeadlineExceededError, match="a model's GPU was still at work in its memory; its request"):
            calls.open(0.05, A=0)
        assert done == []
        assert not (SHM / region.key).exists(), "nobody gets it while the GPU is at work"
        del region


def test_a_models_work_for_others_keeps_no_call_waiting(cuda: FakeCuda) -> None:
    """A model has one event for a stream, and records it for every call."""
    model = FakeCuda()
    recorder, listener = EventRecorder(model), EventListener(cuda)
    of_others: list[str] = []
    with pool_and_opening(cuda) as calls, unfinished_work(model, []) as finish:
        event = recorder.record(0)
        waiting = wait_for_models(listener, [event], time.monotonic() + PATIENCE_S / 2)
        next(waiting)
        with unfinished_work(model, of_others):
            recorder.record(0)
            finish.set()
            calls.run(waiting)
            assert of_others == []


def test_a_wait_for_a_models_gpu_that_is_abandoned_leaves_nothing(cuda: FakeCuda) -> None:
    model = FakeCuda()
    recorder, listener = EventRecorder(model), EventListener(cuda)
    done: list[str] = []
    with unfinished_work(model, done):
        waiting = wait_for_models(listener, [recorder.record(0)], time.monotonic() + PATIENCE_S)
        next(waiting)
        assert live_streams(cuda) == 1
        del waiting
        assert (live_events(cuda), live_streams(cuda)) == (1, 0)
        assert done == []


def test_a_prepared_call_waits_for_a_models_gpu_no_longer_than_it_may(cuda: FakeCuda) -> None:
    """It is asked again and again: what it could not wait for is in its memory still."""
    model = FakeCuda()
    recorder = EventRecorder(model)
    done: list[str] = []
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot = exchange._slot
        with unfinished_work(model, done) as finish:
            generation = slot.begin(table.encode(exchange._table))
            slot.record.started = generation
            slot.record.complete(generation, results.encode((), [recorder.record(0)]))
            slot.is_in_doubt = True
            for _ in range(2):
                with pytest.raises(DeadlineExceededError, match="a model's GPU was still at work in its memory"):
                    calls.run(exchange.send(0.05))
                assert slot.is_in_doubt
            assert done == []
            finish.set()
            with pytest.raises(AttributeError, match="infer"):  # there is nobody to send it to
                calls.run(exchange.send(PATIENCE_S))
        assert done == ["work"]
        exchange.close()
        del slot, exchange


def test_a_prepared_call_whose_results_lie_after_a_request_without_an_answer_stays_in_doubt(cuda: FakeCuda) -> None:
    """Nobody will ever know when the model's GPU has finished there."""
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot = exchange._slot
        slot.record.complete(slot.begin(table.encode(exchange._table)), b"\xff" * 64)
        slot.is_in_doubt = True
        for _ in range(2):
            with pytest.raises(PeerError, match="the model's results break the protocol"):
                calls.run(exchange.send(PATIENCE_S))
            assert slot.is_in_doubt
        exchange.close()
        del slot, exchange


@pytest.mark.parametrize("written", [NO_RESULTS, results.encode(())], ids=["failed", "no outputs"])
def test_a_region_whose_models_have_left_nothing_to_wait_for_is_used_at_once(cuda: FakeCuda, written: bytes) -> None:
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot, region = exchange._slot, exchange._region
        slot.record.complete(slot.begin(table.encode(exchange._table)), written)
        exchange.close()
        again = calls.open(A=0)
        assert again._region is region
        again.close()
        del slot, region, exchange, again
    assert times(cuda, "is_event_done") == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_call_without_an_answer_is_made_again_in_its_own_memory(cuda: FakeCuda, has_begun: bool) -> None:
    with pool_and_opening(cuda) as calls:
        exchange = calls.open(A=0)
        slot = exchange._slot
        generation = slot.begin(table.encode(exchange._table))
        if has_begun:
            slot.record.started = generation
            slot.record.complete(generation, NO_RESULTS)
        slot.is_in_doubt = True
        request = exchange.send(PATIENCE_S)
        with pytest.raises(AttributeError, match="infer"):  # there is nobody to send it to
            next(request)
        assert slot.generation == generation + 2
        exchange.close()
        del slot, exchange


def test_a_region_whose_events_are_lost_is_not_used_again(cuda: FakeCuda) -> None:
    """Nobody will ever know when the model's GPU has finished there."""
    with pool_and_opening(cuda) as calls:
        region = leave_events(calls.open(A=0), Event("0" * 32, bytes(64)))
        again = calls.open(A=0)
        assert again._region is not region
        assert not (SHM / region.key).exists()
        again.close()
        del region, again


def test_calls_with_memory_on_other_gpus_get_other_regions(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        keys = set()
        for devices in ({"A": 0}, {"A": 1}, {"A": 0, "B": 1}, {"A": 0}):
            exchange = calls.open(**devices)
            keys.add(exchange._region.key)
            exchange.close()
        assert len(keys) == 3


def test_a_call_waits_for_device_memory_that_others_hold_and_no_longer_than_it_may(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        held = [calls.open(A=0), calls.open(A=0)]
        with pytest.raises(PoolExhaustedError, match="no device memory became free in time: .* on GPU 0 are in use"):
            calls.open(0.01, A=0)
        threading.Timer(0.05, held.pop().close).start()
        calls.open(A=0).close()
        held.pop().close()


def test_memory_on_one_gpu_that_no_call_uses_makes_room_for_another_call(cuda: FakeCuda) -> None:
    with pool_and_opening(cuda) as calls:
        both = [calls.open(A=0), calls.open(A=0)]
        for exchange in both:
            exchange.close()
        calls.open(A=0, B=1).close()


def test_regions_share_one_listener_so_that_an_event_is_opened_once(new_region: MakeRegion) -> None:
    regions = new_region((0, 1)), new_region()
    assert len({id(each.listener) for region in regions for each in region.device_memory.values()}) == 1
