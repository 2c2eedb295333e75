"""Turns every input upside down, and for that exchanges tensors with Triton's Python backend by DLPack.

The parameter `way` names how. What must be so is asserted here, and fails the request.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call
from shm_backend_utils.tensors import dlpack
from tests.served import Served


class TritonPythonModel(Served):
    def infer(self, call: Call) -> None:
        way = getattr(self, call.parameters["way"].replace(" ", "_"))
        for view in call.inputs.values():
            try:
                way(call, view, view.name.replace("IN_", "OUT_"))
            except Exception as error:
                raise RuntimeError(f"{view.name}: {type(error).__name__}: {error}") from error

    def takes_an_input(self, call, view, name):
        """It takes unversioned capsules, which cannot say that a tensor is read-only."""
        try:
            taken(view.__dlpack__())
        except BufferError:
            call.put(name, np.flip(view.numpy(), 0))

    def takes_an_output(self, call, view, name):
        output = call.output(name, view.shape, view.dtype)
        array = dlpack.consume(taken(output.__dlpack__()).to_dlpack())
        assert (array.dtype, array.shape) == (view.numpy().dtype, view.shape)
        assert array.size == 0 or array.ctypes.data == output.numpy().ctypes.data, "it was copied"
        array[...] = np.flip(view.numpy(), 0)

    def gives_a_tensor(self, call, view, name):
        call.put(name, taken(dlpack.export(np.flip(view.numpy(), 0).copy())))

    def gives_an_output_back(self, call, view, name):
        upside_down = call.output(name, view.shape, view.dtype)
        upside_down.numpy()[...] = np.flip(view.numpy(), 0)
        call.put(name, taken(upside_down.__dlpack__()))


def taken(capsule):
    tensor = pb_utils.Tensor.from_dlpack("T", capsule)
    dlpack.mark_used(capsule)
    return tensor
