"""Tables and addresses that break the protocol: one error by a code, the same over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import code_in
from shm_backend_utils.protocol import table
from shm_backend_utils.protocol.claims import LentRegionClaim, NamedRegionClaim, RegionClaim
from shm_backend_utils.protocol.spans import OutputSpan, Ring, Table
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail, tells_404

from .flavours import url_of
from .hand_made import HandMade, hand_made

X: Final = np.array([1, 2, 3, 4], np.float32)
NOBODY: Final = "0" * 32

Lie = Callable[[HandMade], "Table | bytes | str"]
"""Returns another table, or another address."""


def y_at(made: HandMade, offset: int) -> Table:
    return made.table._replace(outputs={"Y": OutputSpan(0, offset, 64)})


def claiming(*claims: RegionClaim) -> Lie:
    return lambda made: made.table._replace(regions=claims)


def own_region_as_a_lent_one(made: HandMade) -> Table:
    header = made.region.header
    return made.table._replace(
        regions=(LentRegionClaim(made.region.segment.key, header.byte_size, header.token.hex(), 0),)
    )


def with_inputs(**names: str) -> Lie:
    """Return a table with inputs like X under these names."""
    return lambda made: made.table._replace(inputs=dict.fromkeys(names.values(), made.table.inputs["X"]))


def address(part: int, text: str) -> Lie:
    """Return an address with one of its parts, version, model, key, token and slot, replaced."""
    return lambda made: "/".join(text if at == part else each for at, each in enumerate(made.address().split("/")))


# One lie of each kind; the rest is told to a session, and to the decoder, in tests/unit. What is written there, the
# code, and what the text says of it.
LIES: Final[dict[str, tuple[Lie, str, str]]] = {
    "length of some bytes more": (
        lambda made: b"\x70\0\0\0" + table.encode(made.table)[4:],
        "shm:table",
        "length: found 112, expected 104, where the last of",
    ),
    "output one element beyond": (
        lambda made: y_at(made, made.region.header.byte_size - 60),
        "shm:table",
        "outputs[0]: found 64 bytes",
    ),
    "name that is no UTF-8": (
        lambda made: table.encode(made.table).replace(b"X" + bytes(7), b"\xff" + bytes(7)),
        "shm:table",
        "inputs[0].name",
    ),
    "very long name": (with_inputs(x="X" * 1500), "shm:tensor", "has no input 'XXX"),
    "unknown input": (with_inputs(x="X", q="Q"), "shm:tensor", "has no input 'Q'; it has X"),
    "output over an input": (
        lambda made: y_at(made, made.data),
        "shm:table",
        "outputs.Y: found bytes of another tensor",
    ),
    "a ring for one answer": (
        lambda made: made.table._replace(ring=Ring(0, 1, 64)),
        "shm:table",
        "frame_count: found 1, expected 0: model",
    ),
    "region that nobody registered": (claiming(NamedRegionClaim("nobody's")), "shm:gone", 'regions[1] is "nobody'),
    "lent region of nobody": (
        claiming(LentRegionClaim("shmbu-0-0", 4096, NOBODY, 0)),
        "shm:gone",
        "regions[1] does not exist",
    ),
    "lent region that climbs": (
        claiming(LentRegionClaim("shmbu-../../etc/passwd", 4096, NOBODY, 0)),
        "shm:table",
        "regions[1].name",
    ),
    "own region, lent": (own_region_as_a_lent_one, "shm:table", "regions[1]: found memory that the request names befo"),
    "wrong token": (address(3, NOBODY), "shm:refused", "shm_slot refused: the token is not the region's"),
    "no such slot": (address(4, "1"), "shm:table", "shm_slot.slot: found 1, expected less than 1"),
    "slot in other digits": (address(4, "\u0660"), "shm:table", "shm_slot: found other text"),
    "key of nobody": (address(2, "shmbu-0-nobody"), "shm:gone", "shm_slot does not exist"),
    "key that climbs": (address(2, "shmbu-../../etc/passwd"), "shm:table", "shm_slot"),
    "version 1": (address(0, "1"), "shm:version", "found 1, expected 2, which this model's shm_backend_utils"),
}
STATUS: Final = {"shm:gone": ("StatusCode.NOT_FOUND", "404")}


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[tells_404] * (LIES[lie][1] in STATUS)) for lie in LIES])
def test_a_lie_is_refused_and_the_truth_is_served(triton_server: EmbeddedServer, lie: str) -> None:
    """Nothing is written, and no secret is told."""
    make, code, field = LIES[lie]
    with hand_made(triton_server.grpc_url, "repeat", {"X": X}, {"Y": 64}) as made:
        made.parameters["times"] = 1
        told = make(made)
        if isinstance(told, str):
            made.parameters["shm_slot"] = told
        else:
            made.said = told
        made.write()
        before = made.content()
        found: list[Any] = []
        for protocol in ("grpc", "http"):
            with pytest.raises(InferenceServerException) as refusal:
                made.send(url=url_of(triton_server, protocol))
            found.append((refusal.value.status(), refusal.value.message()))
        statuses, (text, over_http) = zip(*found, strict=True)
        assert statuses == STATUS.get(code, ("StatusCode.INVALID_ARGUMENT", "400"))
        assert text == over_http
        assert code_in(text) == code
        assert field in text
        assert len(text) < 2100
        secrets = made.region.segment.key, made.region.header.token.hex(), "/dev/shm/"
        assert [secret for secret in secrets if secret in text] == []
        assert made.content() == before
        assert made.region.record(0).generation == made.generations[0]
        made.parameters.pop("shm_slot", None)
        made.said = made.table
        made.infer()
        assert made.output("Y").tolist() == X.tolist()


@has_ensembles_that_fail
def test_a_lying_table_for_a_step_fails_the_ensemble_by_its_code(triton_server: EmbeddedServer) -> None:
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with hand_made(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.parameters["shm_slot"] = request.address().replace("two_steps", "adder")
        request.said = request.table._replace(outputs={"SUM": OutputSpan(0, 0, 16)})
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException, match="outputs.0.: found 16 bytes at offset 0") as refusal:
            request.send([x])
        assert code_in(refusal.value.message()) == "shm:table"
        assert request.content() == before
        request.said = request.table
        request.infer([x])
        assert request.output("SUM").tolist() == (11 * X).tolist()
