"""Tables whose rows are not those that Triton was told."""

from __future__ import annotations

from typing import Final

import pytest
from tritonclient.utils import InferenceServerException

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer

from ..hand_made import hand_made as made_for
from .breaks import ROOM, Break, X, one_more_input, tensor

BATCH_LIES: Final[dict[str, tuple[Break, str]]] = {
    "no dimension": (tensor("X", shape=[], byte_size=4), "'X'"),
    "no row": (tensor("X", shape=[0, 4], byte_size=0), "'X'"),
    "another number of rows": (
        tensor("X", shape=[2, 4], byte_size=32),
        "'X' has a batch of 2, but the request has one",
    ),
    "another row": (tensor("X", shape=[1, 2], byte_size=8), "'X'"),
    "an input that there is not": (one_more_input(b"Q", shape=[1, 4]), "'Q'"),
}


@pytest.mark.parametrize("lie", BATCH_LIES)
def test_rows_that_are_not_there_are_refused(triton_server: EmbeddedServer, lie: str) -> None:
    change, complaint = BATCH_LIES[lie]
    row = X.reshape(1, 4)
    with made_for(f"http://{triton_server.http_url}", "batch_witness", {"X": row}, {"Y": ROOM}) as request:
        change(request)
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException) as refusal:
            request.send([request.carrier(1)])
        assert code_in(refusal.value.message()) == "shm:tensor"
        assert complaint in refusal.value.message()
        assert request.content() == before
