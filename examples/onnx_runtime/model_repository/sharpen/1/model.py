from __future__ import annotations

from pathlib import Path

import onnxruntime
import triton_python_backend_utils as pb_utils

from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.session = ShmSession.from_args(args)
        self.network = onnxruntime.InferenceSession(
            Path(__file__).with_name("model.onnx"), providers=["CPUExecutionProvider"]
        )

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.input("PICTURE").numpy()
        y = call.output("SHARPENED", x.shape, x.dtype).numpy()
        binding = self.network.io_binding()  # of this call alone: the next one's memory may be elsewhere
        binding.bind_input("x", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        binding.bind_output("y", "cpu", 0, y.dtype, y.shape, y.ctypes.data)
        self.network.run_with_iobinding(binding)

    def finalize(self) -> None:
        self.session.close()
