"""Does what the parameter `deed` says on a GPU that does not exist, and never waits for what it has launched.

Its work is on a stream of its own, which it names.
"""

import json
import os
import select
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.gpu.arrays.device_view import DeviceView
from shm_backend_utils.gpu.runtime import CudaRuntime
from shm_backend_utils.model import Call
from shm_backend_utils.testing.fake_cuda.driver import FakeDriver
from tests.served import Served

PATIENCE_S = 10
DRIVER = FakeDriver.load()


def double(x, y):
    np.multiply(x, 2, out=y)


class TritonPythonModel(Served):
    def initialize(self, args):
        super().initialize(args)
        self.outputs = [output["name"] for output in json.loads(args["model_config"])["output"]]
        self.launched = self.finished = 0
        self.kept = None

    @cached_property
    def runtime(self) -> CudaRuntime:
        return self.session._open_context().arrays.runtime

    @cached_property
    def stream(self) -> int:
        return self.runtime.create_stream(0)

    def infer(self, call: Call) -> None:
        getattr(self, f"do_{call.parameters['deed']}")(call)

    def finalize(self):
        """Close, and say in the server's log what is open before and after."""
        self.kept = None
        if "stream" in vars(self):  # in a harness, the process goes on
            self.runtime.destroy_stream(self.stream, 0)
        before = DRIVER.live()
        super().finalize()
        after = DRIVER.live()._replace(streams=0)
        pb_utils.Logger.log_info(f"closed the session: {before} became {after}, {DRIVER.violations()}")

    def stream_for(self, call: Call) -> int:
        call.ready_on(self.stream)
        return self.stream

    def launch(self, stream, function, *arrays):
        """Put a function of the arrays' memory on a stream."""
        memories = [DRIVER.memory(array.address, array.shape, array.dtype) for array in arrays]

        def run():
            function(*memories)
            self.finished += 1

        self.launched += 1
        DRIVER.launch(stream, run)

    def do_double(self, call):
        """Every output = 2 X, on the GPU wherever they lie."""
        x, stream = call.input("X"), self.stream_for(call)
        for name in filter(call.requested, self.outputs):
            y = call.device_output(name, x.shape, x.dtype)
            self.launch(stream, double, call.to_device(x, stream), y.array)

    def do_double_where_it_is_wanted(self, call):
        """Y = 2 X, on the GPU or on the host."""
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        if isinstance(y, DeviceView):
            stream = self.stream_for(call)
            self.launch(stream, double, call.to_device(x, stream), y.array)
        else:
            double(call.to_host(x), y.numpy())

    def do_double_in_memory_of_its_own(self, call):
        x, stream = call.input("X"), self.stream_for(call)
        y = DRIVER.tensor(np.zeros(x.shape, x.dtype))
        self.launch(stream, double, call.to_device(x, stream), y)
        call.put("Y", y)

    def do_double_on_the_host(self, call):
        call.put("Y", call.to_host(call.input("X")) * 2)

    def do_forward(self, call):
        """Let another model on the same GPU do `double`."""
        y = call.device_output("Y", call.input("X").shape, np.float32)
        call.forward("fake_gpu_pinned", {"X": call.input("X")}, {"Y": y}, parameters={"deed": "double"})

    def do_double_behind_the_gate(self, call):
        """Y = 2 X, when the test lets the model go."""
        x, y = call.input("X"), call.device_output("Y", call.input("X").shape, np.float32)
        wait_at_the_gate(call.parameters)
        self.launch(self.stream_for(call), double, x.array, y.array)

    def do_launch_what_waits_at_the_gate(self, call):
        """Y = 2 X, when the test lets the GPU go, which the model does not wait for."""
        x, y = call.input("X").array, call.device_output("Y", call.input("X").shape, np.float32).array
        parameters, stream = call.parameters, self.stream_for(call)
        self.launch(stream, lambda _: wait_at_the_gate(parameters), y)
        self.launch(stream, double, x, y)

    def do_answer_while_it_runs(self, call):
        """Write 42, wait until somebody writes to the input, and answer that."""
        x, y = call.input("X").array, call.output("Y", (2,), np.float32).array
        question = DRIVER.memory(x.address, x.shape, x.dtype)
        answer = DRIVER.memory(y.address, y.shape, y.dtype)
        answer[0] = 42
        deadline = time.monotonic() + PATIENCE_S
        while question[1] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        answer[1] = question[1] + 1

    def do_keep(self, call):
        """Keep an array over the client's memory."""
        self.kept = call.input("X").array
        call.put("Y", call.input("X"))

    def do_fail_next(self, call):
        """Let CUDA fail the next times that it is asked for something."""
        parameters = call.parameters
        DRIVER.fail_next(parameters["function"], parameters["name"], parameters["times"])
        self.do_tell(call)

    def do_let_go(self, call):
        """Drop what was kept, and sweep."""
        self.kept = None
        self.do_sweep(call)

    def do_sweep(self, call):
        """Unmap at once what would be unmapped in some seconds."""
        context = self.session._open_context()
        context.resolver.sweep()
        deadline = time.monotonic() + PATIENCE_S
        while context.resolver._cuda.collect() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.do_tell(call)

    def do_tell(self, call):
        """Tell how often CUDA has opened memory, what is open now, and how much was undefined."""
        now = [DRIVER.live().opened, len(DRIVER.violations())]
        opens = DRIVER.count("cuIpcOpenMemHandle") + DRIVER.count("cuMemImportFromShareableHandle")
        call.put("Y", np.array([opens, self.launched, self.finished, *now], np.float32))


def wait_at_the_gate(parameters):
    if not Path(parameters["arrived"]).exists():  # a gate stops one request
        return
    go = os.open(parameters["go"], os.O_RDONLY | os.O_NONBLOCK)
    Path(parameters["arrived"]).write_bytes(b"here")  # opens when the test does
    select.select([go], [], [], PATIENCE_S)
    os.close(go)
