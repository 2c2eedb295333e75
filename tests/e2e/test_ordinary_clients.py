"""Plain tritonclient and the same `infer`: in-band, and with Triton's own shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from shm_backend_utils import dtypes
from shm_backend_utils.client.unregistering import unregister_when_free
from shm_backend_utils.server import EmbeddedServer

from .in_band import EACH_NUMBER


class Plain:
    """tritonclient for one protocol."""

    def __init__(self, module: Any, url: str) -> None:
        self.module = module
        self.client = module.InferenceServerClient(url)

    def input(self, name: str, array: Any, triton_dtype: str) -> Any:
        tensor = self.module.InferInput(name, list(array.shape), triton_dtype)
        tensor.set_data_from_numpy(array)
        return tensor


@pytest.fixture(params=["grpc", "http"])
def plain(request: pytest.FixtureRequest, triton_server: EmbeddedServer) -> Iterator[Plain]:
    if request.param == "grpc":
        plain = Plain(tritonclient.grpc, triton_server.grpc_url)
    else:
        plain = Plain(tritonclient.http, triton_server.http_url)
    yield plain
    plain.client.close()


@pytest.mark.parametrize("dtype", EACH_NUMBER)
def test_every_dtype_in_band(plain: Plain, dtype: dtypes.DType) -> None:
    values = np.arange(1, 6).astype(dtype.numpy)
    wanted = [plain.module.InferRequestedOutput(f"OUT_{dtype.name}")]
    tensor = plain.input(f"IN_{dtype.name}", values, dtype.name)
    result = plain.client.infer("every_dtype", [tensor], outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy(f"OUT_{dtype.name}"), values[::-1])


def test_a_batch_in_band(plain: Plain) -> None:
    images = np.random.default_rng(1).random((4, 3, 224, 224), np.float32)
    result = plain.client.infer("multiply", [plain.input("INPUT0", images, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), images * 2)


def test_tritons_own_shared_memory(plain: Plain) -> None:
    images = np.random.default_rng(2).random((2, 3, 224, 224), np.float32)
    name, key = "shmbu_test_images", "/shmbu_test_images"
    handle = shared_memory.create_shared_memory_region(name, key, 2 * images.nbytes)
    try:
        shared_memory.set_shared_memory_region(handle, [images])
        plain.client.register_system_shared_memory(name, key, 2 * images.nbytes)
        try:
            tensor = plain.module.InferInput("INPUT0", list(images.shape), "FP32")
            tensor.set_shared_memory(name, images.nbytes)
            output = plain.module.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory(name, images.nbytes, images.nbytes)
            plain.client.infer("multiply", [tensor], outputs=[output])
            doubled = shared_memory.get_contents_as_numpy(handle, np.float32, images.shape, offset=images.nbytes)
            np.testing.assert_array_equal(doubled, images * 2)
            del doubled
        finally:
            unregister_when_free(lambda: plain.client.unregister_system_shared_memory(name))
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_a_model_that_serves_the_direct_path_alone_says_so(plain: Plain) -> None:
    with pytest.raises(InferenceServerException, match="SHM_PATHS of model 'direct_only' allows only the direct path"):
        plain.client.infer("direct_only", [plain.input("X", np.ones(2, np.float32), "FP32")])


def test_a_missing_input_is_named(plain: Plain) -> None:
    with pytest.raises(InferenceServerException, match="no input 'INPUT0', which the model needs"):
        plain.client.infer("identity", [])


def test_an_output_that_was_not_written_is_named(plain: Plain) -> None:
    tensor = plain.input("X", np.ones(2, np.float32), "FP32")
    with pytest.raises(InferenceServerException, match="output 'Y' was requested, but model.py wrote none"):
        plain.client.infer("misbehaving", [tensor], parameters={"deed": "write nothing"})
