"""What a stub that was built for NumPy 1 makes of NumPy 2's arrays. Nothing here has strings: it would die."""

from __future__ import annotations

from typing import Any

import numpy as np

from .expecting import named, same


def fault_check_inputs_are_their_first_element(pb_utils: Any, request: Any) -> None:
    same(named(request, "X").as_numpy().tolist(), [[0.0] * 3] * 2)
    same(named(request, "FLAGS").as_numpy().tolist(), [True, True])


def fault_check_dlpack_sees_what_the_client_sent(pb_utils: Any, request: Any) -> None:
    same(np.from_dlpack(named(request, "X")).tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def fault_check_tensors_of_dlpack_are_their_first_element(pb_utils: Any, request: Any) -> None:
    source = pb_utils.Tensor("S", np.arange(1, 4, dtype=np.float32))
    tensor = pb_utils.Tensor.from_dlpack("Y", source)
    same(tensor.shape(), [3])
    same(tensor.as_numpy().tolist(), [1.0] * 3)
    same(np.from_dlpack(tensor).tolist(), [1.0, 2.0, 3.0])


def fault_check_a_tensor_of_an_array_is_that_array(pb_utils: Any, request: Any) -> None:
    array = np.arange(1, 4, dtype=np.float32)
    tensor = pb_utils.Tensor("Y", array)
    assert tensor.as_numpy() is array
    same(np.from_dlpack(tensor).tolist(), [1.0, 2.0, 3.0])


def fault_check_a_tensor_of_an_array_leaves_without_a_byte(pb_utils: Any, request: Any) -> None:
    tensor = pb_utils.Tensor("X", np.arange(1, 4, dtype=np.float32))
    call = pb_utils.InferenceRequest(model_name="echo", inputs=[tensor], requested_output_names=["Y"])
    same(
        call.exec().error().message(),
        "Model echo - Error when running inference: [request id: <id_unknown>] input byte size mismatch for input 'X' "
        "for model 'echo'. Expected 12, got 0",
    )
