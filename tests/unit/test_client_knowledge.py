"""What a client learns of models and of the server: it is used, it is bounded, and it is dropped when it is wrong."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from shm_backend_utils.client import BudgetError, InferenceError, PathUnavailableError, PoolOptions, Result, ShmClient
from shm_backend_utils.errors import BatchSizeError, RegionGoneError, RegionRefusedError, ShmError, TensorError, refusal
from shm_backend_utils.memory.pool.inventory import Need, region_size
from shm_backend_utils.memory.pool.pool import SlotPool
from shm_backend_utils.protocol.layout import PAGE_SIZE
from tests.unit.fake_server import Arrays, FakeServer, Order, config
from tests.unit.fake_wires import client_of

X = np.arange(6, dtype=np.float32)


@pytest.fixture
def client(server: FakeServer) -> Iterator[ShmClient]:
    with client_of(server) as client:
        yield client


def core_of(client: ShmClient) -> Any:
    return cast(Any, client._core)


def test_one_large_output_does_not_tax_the_thousand_calls_after_it(client: ShmClient) -> None:
    def infer(count: int) -> Result:
        return client.infer("m", {"IN0": np.ones(count, np.float32)})

    small = [infer(6).overflowed for _ in range(2)]
    before = client.stats().pool_bytes
    assert [infer(600_000).overflowed, small] == [{"OUT0": 2_400_000}, [{"OUT0": 24}, {}]]
    for _ in range(1000):
        assert infer(6).overflowed == {}
    assert client.stats().pool_bytes <= 4 * before
    assert core_of(client).known["m", ""].learned.per_row == {"OUT0": 30}  # of 24, without the input's


@pytest.mark.parametrize("path", ["direct", "auto"])
def test_what_was_learned_and_finds_no_room_is_given_up(server: FakeServer, path: Any) -> None:
    server.configs["m"] = config("m", max_batch_size=64)
    with client_of(server, pool=PoolOptions(max_bytes=2**22), inline_bytes=0) as client:
        rows = np.ones((64, 4), np.float32)
        client.infer("m", {"IN0": np.ones((1, 2**17), np.float32)})
        for _ in range(520):  # each row has room for 640 KiB
            assert client.infer("m", {"IN0": rows}, path=path).path == "direct"
        assert client.infer("m", {"IN0": rows}, path=path).overflowed == {}


def test_sizes_that_are_needed_now_and_then_stay_learned(client: ShmClient) -> None:
    client.infer("m", {"IN0": np.ones(600, np.float32)})
    for number in range(1000):
        count = 600 if number % 100 == 0 else 6
        assert client.infer("m", {"IN0": np.ones(count, np.float32)}).overflowed == {}
    for _ in range(600):  # which forgets nothing
        client.infer("m", {"IN0": X}, path="inline")
    assert client.infer("m", {"IN0": np.ones(600, np.float32)}).overflowed == {}


def test_models_of_different_names_and_versions_are_told_apart(client: ShmClient, server: FakeServer) -> None:
    server.configs["other"] = config("other", dims="-1,-1")
    for name, version in itertools.product(("m", "other"), ("", "1", "2")):
        given = X if name == "m" else X.reshape(2, 3)
        client.infer(name, {"IN0": given}, model_version=version)
        assert (server.orders[-1].model, server.orders[-1].version) == (name, version)


def test_rows_of_a_learned_size_begin_where_an_element_may(client: ShmClient, server: FakeServer) -> None:
    server.configs["b"] = config("b", max_batch_size=2)
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    for _ in range(2):  # of the first one's outputs nobody knows the size
        assert (client.infer("b", {"IN0": rows}, split=True)["OUT0"] == 2 * rows).all()


def test_what_a_mapping_of_inputs_raises_is_told_as_it_is(client: ShmClient) -> None:
    class Broken(dict[str, Any]):
        def items(self) -> NoReturn:
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="^not today$"):
        client.submit("m", Broken())


def test_a_model_that_takes_less_by_now_is_known_to_the_next_split_call(client: ShmClient, server: FakeServer) -> None:
    def refuse_more(order: Order) -> None:
        if order.inputs["SHM"].shape[0] > 2:
            raise InferenceError("batch size must be <= 2")

    server.configs["b"] = config("b", dims="3", max_batch_size=4)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    client.infer("b", {"IN0": rows[:2]}).release()
    server.configs["b"] = config("b", dims="3", max_batch_size=2)
    server.before = refuse_more
    with pytest.raises(BatchSizeError, match="a batch of 4, but model 'b' takes 1 to 2"):
        client.infer("b", {"IN0": rows}, split=True, path="direct")
    assert (client.infer("b", {"IN0": rows}, split=True, path="direct")["OUT0"] == 2 * rows).all()


def test_outputs_larger_than_the_budget_come_through_triton_every_time(protocol: str) -> None:
    def large(_: Order, inputs: Arrays) -> Arrays:
        return {"OUT0": np.full(2**20, inputs["IN0"][0])}

    pool = PoolOptions(max_bytes=2**20)
    with FakeServer(config("m"), compute=large) as server, client_of(server, protocol, pool=pool) as client:
        for number in range(3):
            result = client.infer("m", {"IN0": np.array([number], np.float32)})
            assert result.overflowed == {"OUT0": 2**22}
            assert (result["OUT0"] == number).all()
        with pytest.raises(BudgetError):  # what the user vouches for must fit
            client.infer("m", {"IN0": X}, outputs={"OUT0": 2**22})


def test_frames_that_were_larger_than_a_ring_may_be_do_not_close_the_next_stream() -> None:
    def frames(_: Order, inputs: Arrays) -> list[Arrays]:
        return [{"OUT0": np.full(10**5, number, np.float32)} for number in range(3)]

    model = config("m", model_transaction_policy={"decoupled": True})
    with FakeServer(model, compute=frames) as server, client_of(server, pool=PoolOptions(max_bytes=2**20)) as client:
        for _ in range(3):
            received = [result["OUT0"][0] for result in client.stream("m", {"IN0": X})]
            assert received == [0, 1, 2]


MANY = 100


def test_models_that_there_are_not_and_calls_that_do_not_fit_are_not_kept(client: ShmClient) -> None:
    client.infer("m", {"IN0": X})
    (known,) = core_of(client).known.values()
    for number in range(MANY):
        with pytest.raises(InferenceError):
            client.infer(f"nobody's {number}", {"IN0": X})
        with pytest.raises(TensorError):
            client.infer("m", {f"IN{number + 1}": X}, outputs={f"OUT{number}": 4})
    assert list(core_of(client).known.values()) == [known]
    assert set(known.learned.per_row) <= {"OUT0"}


def test_one_refusal_is_kept_for_each_path_until_the_next_look(client: ShmClient, server: FakeServer) -> None:
    refused: list[int] = []

    def refuse(order: Order) -> None:
        if "shm_slot" in order.parameters:
            refused.append(1)
            raise InferenceError(refusal(RegionRefusedError("region", f"for the {len(refused)}th time")))

    client.infer("m", {"IN0": X})
    server.before = refuse
    for _ in range(20):
        with contextlib.suppress(InferenceError, PathUnavailableError):
            client.infer("m", {"IN0": X}, path="direct")
    (known,) = core_of(client).known.values()
    assert known.refusals.keys() == {"direct"}
    assert client.infer("m", {"IN0": X}).path != "direct"
    server.before = lambda _: None
    assert client.explain("m").path == "direct"
    assert client.infer("m", {"IN0": X}).path == "direct"


def test_kinds_without_end_leave_no_more_shelves_than_regions() -> None:
    budget = 8 * region_size(Need(PAGE_SIZE, 4, 4 * PAGE_SIZE))
    rng = random.Random(1)
    with contextlib.closing(SlotPool(PoolOptions(max_bytes=budget))) as pool:
        for number in range(MANY):
            need = Need(rng.randint(1, PAGE_SIZE), rng.randint(1, 4), rng.randint(1, 4) * PAGE_SIZE, f"{number}")
            pool.take_granted(pool.request(need, "nobody"))
            shelves = pool._inventory.shelves
            regions = pool.status.idle + pool.status.held + pool.status.quarantined
            assert sum(map(len, shelves.values())) <= regions
            assert pool.status.byte_size <= budget


def test_a_server_that_registers_little_is_named(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = server.register

    def register(name: str, key: str, byte_size: int) -> None:
        if byte_size > 2**16:
            raise InferenceError("no room for so much", "StatusCode.INTERNAL")
        honest(name, key, byte_size)

    monkeypatch.setattr(server, "register", register)
    given = np.ones(32_000, np.float32)
    with client_of(server, pool=PoolOptions(max_bytes=294_912)) as client, pytest.raises(ShmError) as caught:
        client.infer("m", {"IN0": given}, path="triton-shm", outputs={"OUT0": given.nbytes}, timeout_s=0.2)
    assert "no room for so much" in str(caught.value)


class Losing(FakeServer):
    """Its model cannot open some regions any more, by their keys."""

    lost: frozenset[str] = frozenset()

    def _region(self, key: str, token: str) -> Any:
        if key in self.lost:
            raise InferenceError(refusal(RegionGoneError("the request's region was removed by its owner")))
        return super()._region(key, token)


def test_of_a_region_that_is_gone_no_part_is_used_again() -> None:
    with Losing(config("m")) as server, client_of(server, path="direct") as client:
        kept = [client.infer("m", {"IN0": X}) for _ in range(12)]
        regions = [region for region, _ in client._memory.pool.held()]
        shared = {region.key for region in regions if len(region.whole.parts) > 1}
        Losing.lost = frozenset(shared)
        del regions
        while kept:
            kept.pop(0)  # the last one is taken first
        for _ in range(20):
            np.testing.assert_array_equal(client.infer("m", {"IN0": X})["OUT0"], 2 * X)
        assert client.stats().retries == 1
