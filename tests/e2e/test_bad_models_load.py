"""Models that do not load: what a harness says of them is what a server says."""

from __future__ import annotations

import shutil

import pytest
from tritonclient.utils import InferenceServerException

from tests.releases import gives_up_loading
from tests.unit.harness.folders import BAD_CODE, folder_of

from .loading_server import LoadingServer


@gives_up_loading
@pytest.mark.parametrize("what", BAD_CODE)
def test_a_server_says_so(loading_server: LoadingServer, what: str) -> None:
    code, said, _ = BAD_CODE[what]
    folder = folder_of(loading_server.models, code)
    try:
        with pytest.raises(InferenceServerException) as told:
            loading_server.grpc.load_model("m")
        expected = f"load failed for model 'm': version 1 is at UNAVAILABLE state: {said}"
        assert told.value.message().startswith(expected)
    finally:
        shutil.rmtree(folder)
