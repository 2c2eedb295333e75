"""Requests for another version, another model, or at what is no address."""

from __future__ import annotations

import json
from typing import Final

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from shm_backend_utils.protocol.refusals import code_in
from shm_backend_utils.server import EmbeddedServer
from tests.releases import has_ensembles_that_fail, takes_floats

from ..flavours import url_of
from ..hand_made import FIRST_GENERATION, STEP, HandMade
from ..hand_made import hand_made as made_for
from .breaks import REGION_SIZE, X, is_served, refusals_of


def test_a_client_of_version_1_is_told_both_versions(made: HandMade, triton_server: EmbeddedServer) -> None:
    key, token = made.address.key, made.address.token
    region = {"kind": "system", "key": key, "byte_size": REGION_SIZE, "token": token, "slot": 0}
    tensors = {"inputs": {"X": [0, 8192, 16, "FP32", [4]]}, "outputs": {"Y": [0, 8192 + STEP, 16]}}
    descriptor = {"v": 1, "model": "repeat", "regions": [region], **tensors}
    made.write()
    before = made.content()
    for protocol in ("grpc", "http"):
        client = made.client(url_of(triton_server, protocol))
        parameters = {"shm_io": json.dumps(descriptor), "shm_generation": FIRST_GENERATION, "times": 1}
        with pytest.raises(InferenceServerException) as refusal:
            client.infer("repeat", [], parameters=parameters)
        text = refusal.value.message()
        assert code_in(text) == "shm:version"
        assert "found 1, expected 2" in text
        assert key not in text
        assert token not in text
    assert made.content() == before
    assert is_served(made)


A_FLOAT: Final = pytest.param(2.5, marks=takes_floats)
NO_ADDRESSES: Final = (7, True, A_FLOAT, "", "2", "2/", "2////", "/" * 100, "x" * 100_000)


@pytest.mark.parametrize("value", NO_ADDRESSES, ids=lambda value: str(value)[:9])
def test_what_is_no_address_is_refused(made: HandMade, triton_server: EmbeddedServer, value: object) -> None:
    made.parameters["shm_slot"] = value
    texts = {text for _, text in refusals_of(made, triton_server)}
    assert len(texts) == 1
    assert code_in(texts.pop()) in ("shm:table", "shm:version")
    del made.parameters["shm_slot"]
    assert is_served(made)


def test_a_slot_and_a_descriptor_at_once_are_refused(made: HandMade, triton_server: EmbeddedServer) -> None:
    made.parameters["shm_io"] = json.dumps({"v": 1, "model": "repeat", "regions": [], "inputs": {}, "outputs": {}})
    texts = {text for _, text in refusals_of(made, triton_server)}
    assert len(texts) == 1
    assert "shm:table: shm_io: found a descriptor beside shm_slot, expected one of the two" in texts.pop()
    del made.parameters["shm_io"]
    assert is_served(made)


def test_a_table_for_another_model_is_not_looked_at(triton_server: EmbeddedServer) -> None:
    """The parameters reach every step of an ensemble. Whom the slot is not for, that has none of its tensors."""
    x = tritonclient.grpc.InferInput("X", [4], "FP32")
    x.set_data_from_numpy(X)
    with made_for(triton_server.grpc_url, "two_steps", {"B": 10 * X}, {"SUM": 16}) as request:
        request.address.model = "multiply"
        request.table.length = 0
        request.write()
        before = request.content()
        with pytest.raises(InferenceServerException, match="its shm_slot speaks to another model") as refusal:
            request.send([x])
        assert "shm:missing: " in refusal.value.message()
        assert request.content() == before


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
