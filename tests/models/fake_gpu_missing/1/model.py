"""Doubles on the host. It can use no GPU: NVIDIA's bindings are not installed; or, if a request says so, no GPU."""

import sys

from shm_backend_utils.gpu.errors import CudaError
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call, ShmSession
from tests.served import Served


class TritonPythonModel(Served):
    def initialize(self, args):
        sys.modules["cuda.bindings.driver"] = None  # wherever it is, it is not found
        self.lacks = "bindings"
        self.session = ShmSession.from_args(args, cuda=CudaAccess(self.load))

    def load(self):
        if self.lacks == "GPU":
            raise CudaError("counting the GPUs", "CUDA_ERROR_NO_DEVICE")
        return CudaRuntime()

    def infer(self, call: Call) -> None:
        self.lacks = call.parameters.get("lacks", self.lacks)
        call.put("Y", call.input("X").numpy() * 2)
