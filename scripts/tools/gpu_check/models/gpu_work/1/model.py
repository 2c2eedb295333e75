"""Has a GPU work on its input by one library's kernels, or passes it on. The request's parameters say how:

``work``: "quick" (the default), "pass", or "head" for the first numbers alone. ``pitch``: of an output that is a copy.
``stream``: "unnamed", if the call names none. ``hold``: whose work waits at the gate, the "call"'s or a "stranger"'s.
``capture``: the mode of a capture that another thread begins here, with ``blocking`` on a stream that blocks; the next
request ends it, and fails if it has not survived.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.tools.gpu_check.kernels import Capture, Gate, Pitched, load_kernels
from shm_backend_utils.errors import ModelError
from shm_backend_utils.gpu.arrays.device_array import DeviceArray
from shm_backend_utils.gpu.memory.access import CudaAccess
from shm_backend_utils.gpu.streams import named_stream
from shm_backend_utils.model import Call, ShmSession

HEAD = 64


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.cuda = CudaAccess()
        parameters = json.loads(args["model_config"])["parameters"]
        self.kernels = load_kernels(parameters["LIBRARY"]["string_value"], self.cuda.runtime)
        self.gate = Gate(Path(parameters["GATE"]["string_value"]))
        self.streams: dict[tuple[str, int], Any] = {}
        self.capture: Capture | None = None
        self.session = ShmSession.from_args(args, self.cuda)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        asked = call.parameters
        x = call.input("INPUT0")
        self.see_captures(asked)
        if asked.get("work") == "pass":
            call.put("OUTPUT0", x)
            return
        device = getattr(x, "device", 0)
        stream = self.stream_of("call", device)
        if asked.get("stream") != "unnamed":
            call.ready_on(stream)  # before the input is asked for: a copy of it is ordered with this stream, too
        if "hold" in asked:
            self.gate.hold(self.cuda.runtime, self.stream_of(asked["hold"], device), device)
        source = call.to_device(x, cuda_stream=stream)
        if "pitch" in asked:
            call.put("OUTPUT0", self.pitched(source, asked["pitch"], named_stream(stream).handle))
        else:
            if asked.get("work") == "head":
                source = source[:HEAD]
            y = call.device_output("OUTPUT0", source.shape, source.dtype)
            self.kernels.quick(source, y.array, stream)
        self.gate.has_launched()

    def stream_of(self, whose: str, device: int) -> Any:
        if (whose, device) not in self.streams:
            self.streams[whose, device] = self.kernels.stream(device)
        return self.streams[whose, device]

    def pitched(self, x: DeviceArray, pitch: int, stream: int) -> Pitched:
        memory = self.kernels.tensor((x.size - 1) * pitch // 4 + 1, x.device)
        address = memory.__cuda_array_interface__["data"][0]
        with self.cuda.runtime.on(x.device):
            for number in range(x.size):
                self.cuda.runtime.copy(address + number * pitch, x.address + 4 * number, 4, stream)
        return Pitched(memory, address, x.size, pitch)

    def see_captures(self, asked: dict[str, Any]) -> None:
        capture, self.capture = self.capture, None
        error = "" if capture is None else capture.end()
        if error:
            raise ModelError(f"the capture of another thread ended with {error}")
        if "capture" in asked:
            self.capture = Capture(self.cuda.runtime, asked["capture"], is_blocking=bool(asked.get("blocking")))

    def finalize(self) -> None:
        self.session.close()
