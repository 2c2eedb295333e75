"""Requests for another version, another model, or at what is no address."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail

from ..hand_made import STEP
from ..hand_made import hand_made as made_for
from .breaks import X


@has_ensembles_that_fail
def test_a_lying_table_for_a_step_fails_the_ensemble_by_its_code(triton_server: EmbeddedServer) -> None:
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with made_for(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.address.model = "adder"
        request.table["SUM"].offset = 0
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException) as refusal:
            request.send([x])
        assert code_in(refusal.value.message()) == "shm:table"
        assert "outputs[0]: found 16 bytes at offset 0" in refusal.value.message()
        assert request.content() == before
        request.table["SUM"].offset = 8192 + STEP
        request.infer([x])
        assert request.output("SUM", np.float32).tolist() == (11 * X).tolist()
