"""Tables and addresses that break the protocol: one error by a code, the same over gRPC and HTTP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.errors import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail, tells_404

from .flavours import url_of
from .hand_made import FP32, STEP, Claim, HandMade, Tensor, hand_made

X: Final = np.array([1, 2, 3, 4], np.float32)
REGION_SIZE: Final = 2 * 4096 + 8 * STEP
UNKNOWN: Final = Tensor(b"Q", 8192 + 4 * STEP, 16, datatype=FP32, shape=[4])


def address(**fields: Any) -> Callable[[HandMade], object]:
    return lambda request: vars(request.address).update(fields)


def tensor(which: str, **fields: Any) -> Callable[[HandMade], object]:
    return lambda request: vars(request.table[which]).update(fields)


def claim(kind: int, name: bytes, byte_size: int = 0) -> Callable[[HandMade], object]:
    return lambda request: request.table.regions.append(Claim(kind, name, byte_size))


def own_region_as_a_lent_one(request: HandMade) -> None:
    header, name = request.region.header, request.region.segment.key.encode()
    request.table.regions.append(Claim(1, name, header.byte_size, header.token))


# One lie of each kind; the rest is told to a session, and to the decoder, in tests/unit. What is written there, the
# code, and what the text says of it.
LIES: Final[dict[str, tuple[Callable[[HandMade], object], str, str]]] = {
    "length of some bytes more": (
        lambda request: vars(request.table).update(length=112),
        "shm:table",
        "length: found 112, expected 104, where the last of",
    ),
    "output one element beyond": (tensor("Y", offset=REGION_SIZE - 60), "shm:table", "outputs[0]: found 64 bytes"),
    "name that is no UTF-8": (tensor("X", name=b"\xff\xfe"), "shm:table", "inputs[0].name"),
    "very long name": (tensor("X", name=b"X" * 1500), "shm:tensor", "has no input 'XXX"),
    "unknown input": (
        lambda request: request.table.inputs.append(UNKNOWN),
        "shm:tensor",
        "has no input 'Q'; it has X",
    ),
    "output over an input": (tensor("Y", offset=8192), "shm:table", "outputs.Y: found bytes of another tensor"),
    "a ring for one answer": (
        lambda request: vars(request.table).update(frame_count=1),
        "shm:table",
        "frame_count: found 1, expected 0: model",
    ),
    "region that nobody registered": (claim(3, b"nobody's"), "shm:gone", 'regions[1] is "nobody'),
    "lent region of nobody": (claim(1, b"shmbu-0-0", 4096), "shm:gone", "regions[1] does not exist"),
    "lent region that climbs": (claim(1, b"shmbu-../../etc/passwd", 4096), "shm:table", "regions[1].name"),
    "own region, lent": (own_region_as_a_lent_one, "shm:table", "regions[1]: found memory that the request names befo"),
    "wrong token": (address(token="0" * 32), "shm:refused", "shm_slot refused: the token is not the region's"),
    "no such slot": (address(slot=1), "shm:table", "shm_slot.slot: found 1, expected less than 1"),
    "slot in other digits": (address(slot="\u0660"), "shm:table", "shm_slot: found other text"),
    "key of nobody": (address(key="shmbu-0-nobody"), "shm:gone", "shm_slot does not exist"),
    "key that climbs": (address(key="shmbu-../../etc/passwd"), "shm:table", "shm_slot"),
    "version 1": (address(version=1), "shm:version", "found 1, expected 2, which this model's shm_backend_utils"),
}
STATUS: Final = {"shm:gone": ("StatusCode.NOT_FOUND", "404")}


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[tells_404] * (LIES[lie][1] in STATUS)) for lie in LIES])
def test_a_lie_is_refused_and_the_truth_is_served(triton_server: EmbeddedServer, lie: str) -> None:
    """Nothing is written, and no secret is told."""
    change, code, field = LIES[lie]
    with hand_made(triton_server.grpc_url, "repeat", {"X": X}, {"Y": 64}) as made:
        made.parameters["times"] = 1
        honest = copy.deepcopy(made.address), copy.deepcopy(made.table)
        change(made)
        made.write()
        before, found = made.content(), []
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
        assert made.record.generation == made.recorded
        made.address, made.table = honest
        made.infer()
        assert (made.output("Y", np.float32)[: X.size] == X).all()


@has_ensembles_that_fail
def test_a_lying_table_for_a_step_fails_the_ensemble_by_its_code(triton_server: EmbeddedServer) -> None:
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with hand_made(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.address.model = "adder"
        request.table["SUM"].offset = 0
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException, match="outputs.0.: found 16 bytes at offset 0") as refusal:
            request.send([x])
        assert code_in(refusal.value.message()) == "shm:table"
        assert request.content() == before
        request.table["SUM"].offset = 8192 + STEP
        request.infer([x])
        assert request.output("SUM", np.float32).tolist() == (11 * X).tolist()
