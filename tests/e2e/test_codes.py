"""What a client does next depends on a refusal's code, which is the same over gRPC and HTTP, never on its prose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shm_backend_utils.client import InferenceError
from shm_backend_utils.client.errors import MemoryRefusedError
from shm_backend_utils.memory.mapped_segment import MappedSegment
from shm_backend_utils.memory.pool.slot import Slot
from shm_backend_utils.protocol.refusals import code_in

from .eventually import all_memory_comes_back
from .flavours import AnyClient
from .own_regions import give_another_token, lose, own_regions

pytestmark = pytest.mark.every_region

X = np.arange(4, dtype=np.float32)


def region_of_this_process() -> MappedSegment:
    (region,) = own_regions()
    return region


def infer(client: AnyClient) -> None:
    with client.infer("direct_only", {"X": X}, outputs={"Y": X.nbytes}) as result:
        assert result["Y"].tolist() == X.tolist()


@pytest.mark.parametrize("loss", [lose, give_another_token])
def test_memory_that_is_refused_is_replaced_and_the_request_sent_again(
    any_client: AnyClient, loss: Callable[[MappedSegment], None]
) -> None:
    with any_client.prepare("direct_only", {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}):
        loss(region_of_this_process())  # no model has opened it
    all_memory_comes_back(any_client)
    for _ in range(2):
        infer(any_client)
        assert any_client.stats().retries == 1


@pytest.mark.parametrize("loss", [lose, give_another_token])
def test_a_prepared_call_whose_memory_is_lost_says_so(
    any_client: AnyClient, loss: Callable[[MappedSegment], None]
) -> None:
    with any_client.prepare("direct_only", {"X": (X.shape, X.dtype)}, outputs={"Y": X.nbytes}) as call:
        loss(region_of_this_process())
        with pytest.raises(MemoryRefusedError, match="this call's memory is lost: prepare another call") as refusal:
            call.infer()
    assert code_in(str(refusal.value)) in ("shm:gone", "shm:refused")
    infer(any_client)


def test_a_stale_request_is_not_sent_again(any_client: AnyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client itself gave it up: somebody else may have the memory by now."""
    begin = Slot.begin

    def begin_and_give_up(slot: Slot, *arguments: object) -> int:
        generation = begin(slot, *arguments)  # type: ignore[arg-type]
        slot.record.generation += 1
        return generation

    infer(any_client)
    monkeypatch.setattr(Slot, "begin", begin_and_give_up)
    with pytest.raises(InferenceError) as refusal:
        infer(any_client)
    monkeypatch.undo()
    assert code_in(str(refusal.value)) == "shm:stale"
    assert not isinstance(refusal.value, MemoryRefusedError)
    assert any_client.stats().retries == 0
    infer(any_client)
