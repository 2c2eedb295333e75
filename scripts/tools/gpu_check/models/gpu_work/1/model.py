"""Has a GPU work on its input by one library's kernels, at once or late, with its stream named or not. Or passes it."""

from __future__ import annotations

import json
from typing import Any

from scripts.tools.gpu_check.kernels import load_kernels
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        cuda = CudaAccess()
        parameters = json.loads(args["model_config"])["parameters"]
        chosen = {name: parameters[name]["string_value"] for name in ("LIBRARY", "WORK", "STREAM")}
        self.kernels = load_kernels(chosen["LIBRARY"], cuda.runtime)
        self.work = {"quick": self.kernels.quick, "late": self.kernels.late}.get(chosen["WORK"])
        self.is_named = chosen["STREAM"] == "named"
        self.streams: dict[int, Any] = {}
        self.session = ShmSession.from_args(args, cuda)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer if self.work else self.pass_on)

    def pass_on(self, call: Call) -> None:
        call.put("OUTPUT0", call.input("INPUT0"))

    def infer(self, call: Call) -> None:
        x = call.input("INPUT0")
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        if y.device not in self.streams:
            self.streams[y.device] = self.kernels.stream(y.device)
        stream = self.streams[y.device]
        if self.is_named:
            call.ready_on(stream)  # before the input is asked for: a copy of it is ordered with this stream, too
        self.work(call.to_device(x, cuda_stream=stream), y.array, stream)

    def finalize(self) -> None:
        self.session.close()
