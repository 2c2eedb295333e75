from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        cuda = CudaAccess()
        cuda.runtime.make_current(int(args["model_instance_device_id"]))  # fails without bindings, or without a GPU
        import cupy  # noqa: PLC0415  # only after it is certain that there is a GPU

        self.cupy = cupy
        self.streams: dict[int, Any] = {}  # by GPU: the client's may differ from the instance's
        self.session = ShmSession.from_args(args, cuda)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.to_device(call.input("INPUT0"))  # no copy if it is on a GPU
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        with self.cupy.cuda.Device(y.device), self.stream(y.device) as stream:
            call.ready_on(stream)  # else the call waits for the whole GPU
            self.cupy.multiply(x.cupy(), 2, out=y.cupy())

    def stream(self, device: int) -> Any:
        if device not in self.streams:
            self.streams[device] = self.cupy.cuda.Stream(non_blocking=True)
        return self.streams[device]

    def finalize(self) -> None:
        self.session.close()
