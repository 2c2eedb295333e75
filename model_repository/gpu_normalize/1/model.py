from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import Call, ShmSession

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, per RGB channel, in units of 255
STD = (0.229, 0.224, 0.225)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        cuda = CudaAccess()
        cuda.runtime.make_current(int(args["model_instance_device_id"]))  # fails without bindings, or without a GPU
        import cupy  # noqa: PLC0415  # only after it is certain that there is a GPU

        self.cupy = cupy
        self.streams: dict[int, Any] = {}  # by GPU: the client's may differ from the instance's
        self.normalize = cupy.ElementwiseKernel(
            "uint8 x, float32 scale, float32 shift", "float32 y", "y = x * scale + shift", "normalize"
        )
        self.session = ShmSession.from_args(args, cuda)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        images = call.to_device(call.input("IMAGES"))  # no copy if they are on a GPU
        count, height, width, channels = images.shape
        output = call.device_output("NORMALIZED", (count, channels, height, width), np.float32)
        with self.cupy.cuda.Device(output.device), self.stream(output.device) as stream:
            call.ready_on(stream)  # else the call waits for the whole GPU
            x, y = images.cupy(), output.cupy()
            for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
                self.normalize(x[..., channel], 1 / (255 * std), -mean / std, y[:, channel])

    def stream(self, device: int) -> Any:
        if device not in self.streams:
            self.streams[device] = self.cupy.cuda.Stream(non_blocking=True)
        return self.streams[device]

    def finalize(self) -> None:
        self.session.close()
