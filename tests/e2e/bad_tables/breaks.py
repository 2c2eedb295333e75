"""Ways to break a valid request, and how its refusal is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.server import EmbeddedServer

from ..flavours import url_of
from ..hand_made import DATATYPES, STEP, HandMade, Tensor
from ..hand_made import hand_made as made_for

X: Final = np.array([1, 2, 3, 4], np.float32)
ROOM: Final = 64
REGION_SIZE: Final = 2 * 4096 + 8 * STEP

Break = Callable[[HandMade], None]


@contextlib.contextmanager
def valid(url: str, **options: Any) -> Iterator[HandMade]:
    """Make a valid request to a model that copies X to Y."""
    with made_for(url, "repeat", {"X": X}, {"Y": ROOM}, **options) as request:
        request.parameters["times"] = 1
        yield request


def refusals_of(request: HandMade, server: EmbeddedServer, *carriers: Any) -> list[tuple[str, str]]:
    """Return status and text of a request's refusal over gRPC and HTTP; nothing is written, and nothing told."""
    request.write()
    before = request.content()
    found = []
    for protocol in ("grpc", "http"):
        with pytest.raises(InferenceServerException) as refusal:
            request.send(carriers, url=url_of(server, protocol))
        text = refusal.value.message()
        found.append((refusal.value.status(), text))
        for secret in (request.region.segment.key, request.region.header.token.hex()):
            assert secret not in text
        assert "/dev/shm/" not in text
        assert len(text) < 2100
    assert request.content() == before
    assert request.record.generation == request.recorded
    return found


def is_served(request: HandMade) -> bool:
    request.infer()
    return bool((request.output("Y", np.float32)[: X.size] == X).all())


def tensor(which: str, **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        for field, value in fields.items():
            setattr(request.table[which], field, value)

    return change


def patch(offset: int, data: bytes) -> Break:
    return lambda request: request.patches.update({offset: data})


def one_more_input(name: bytes, **fields: Any) -> Break:
    def change(request: HandMade) -> None:
        given = {"offset": 8192 + 4 * STEP, "byte_size": 16, "datatype": DATATYPES["FP32"], "shape": [4], **fields}
        request.table.inputs.append(Tensor(name, **given))

    return change
