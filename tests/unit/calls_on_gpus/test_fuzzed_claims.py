"""Claims of CUDA memory whose fields are broken: each is refused, and leaves nothing, or served; so is the next one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shm_backend_utils.errors import TableError
from shm_backend_utils.memory.cuda.runtime import HANDLE_LENGTH
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.mapping.resolver import collect_all
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import CudaRegionClaim
from shm_backend_utils.protocol.spans import Table
from tests.property.fuzz_tables import mutated
from tests.unit.calls_on_gpus.device_calls import DEVICE, Client
from tests.unit.emulated import delivered, message_of
from tests.unit.fake_gpu import MODEL, left_of
from tests.unit.manager_cuda.conftest import NOTHING

REQUESTS = 600
HEAD = 32
"""Bytes of a claim in front of its handles."""


def copy_input(call: Call) -> None:
    call.put("Y", call.input("X"))


def said_by(client: Client, generation: int) -> Table:
    """Return the table of the request that the client has begun."""
    header = client.region.header
    data = bytes(client.region.record(0).request)
    found, said = table.decode(data, client.host.data, header.byte_size)
    assert found == generation
    return said


def broken(rng: random.Random, client: Client, encoded: bytes) -> bytes:
    """Return a table in which a claim, its handles as a whole, its event, or a tensor is not what it was."""
    handles = [each.handle for each in client.allocations]
    begin = encoded.index(rng.choice(handles))
    way = rng.choice(("claim", "claim", "event", "handle", "tensors"))
    if way == "handle":
        other = rng.choice((*handles, client.allocations[0].event_handle, rng.randbytes(HANDLE_LENGTH)))
        return encoded[:begin] + other + encoded[begin + HANDLE_LENGTH :]
    if way == "claim":
        return mutated(rng, encoded, begin - HEAD, begin)
    if way == "event":
        return mutated(rng, encoded, begin + HANDLE_LENGTH, begin + 2 * HANDLE_LENGTH)
    return mutated(rng, encoded, encoded.index(handles[-1]) + 2 * HANDLE_LENGTH, len(encoded))


def cuda_regions(said: Table) -> list[CudaRegionClaim]:
    return [each for each in said.regions if isinstance(each, CudaRegionClaim)]


def is_passing(claim: Any) -> bool:
    return isinstance(claim, CudaRegionClaim) and (claim.is_for_one_request or claim.fence is None)


@pytest.mark.parametrize(
    "claimed", [{"is_for_one_request": True}, {}, {"fence": None}], ids=["lent", "fenced", "not fenced"]
)
def test_broken_claims_leave_nothing_mapped_and_the_next_request_is_served(
    client: Client, session: ShmSession, claimed: dict[str, Any]
) -> None:
    rng, codes = random.Random(1), Counter[str]()
    for number in range(REQUESTS):
        client.write(0, number)
        client.request(0, {"Y": DEVICE})
        said = said_by(client, client.host.generations[0])
        whole = Table(said.inputs, said.outputs, tuple([replace(each, **claimed) for each in cuda_regions(said)]))
        sent = delivered(client.host.begin(broken(rng, client, table.encode(whole)), 0), ["Y"])
        try:
            claims = said_by(client, client.host.generations[0]).regions
        except (TableError, AssertionError):
            claims = ()
        (response,) = session.serve([sent], copy_input)
        codes[message_of(response).split(" ")[0]] += 1
        assert client.is_over(0) or response.error() is not None
        resolver = session._open_context().resolver
        if not (claims and all(map(is_passing, claims))):
            resolver.registry.unregister_all()  # what is fenced stays mapped, and is none of what is looked for here
            collect_all(resolver._cuda)
        assert left_of(MODEL) == NOTHING
        assert client.host.is_free(0), "what was lent is still borrowed"
        if number % 50 == 0:
            (response,) = session.serve([delivered(client.host.begin(whole, 0), ["Y"])], copy_input)
            assert response.error() is None
            assert client.output(0, "Y") == [number] * 4
    assert set(codes) <= {"", "shm:table:", "shm:refused:", "shm:tensor:", "shm:missing:", "shm:stale:", "shm:machine:"}
    assert min(codes[""], codes["shm:table:"], codes["shm:refused:"]) > REQUESTS // 50, codes
