"""Does what the parameter `deed` says on a GPU that does not exist, and never waits for what it has launched."""

import json
import os
import select
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.memory.cuda.runtime import CudaError
from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.tensors.device_view import DeviceView
from shm_backend_utils.testing.fake_cuda.runtime import FakeCuda, kernel

PATIENCE_S = 10


def double(x, y):
    np.multiply(x, 2, out=y)


class TritonPythonModel:
    def initialize(self, args):
        self.cuda = FakeCuda()
        self.session = ShmSession.from_args(args, cuda=CudaAccess(lambda: self.cuda))
        self.outputs = [output["name"] for output in json.loads(args["model_config"])["output"]]
        self.launched = self.finished = 0
        self.kept = None
        self.own = None

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        getattr(self, f"do_{call.parameters['deed']}")(call)

    def finalize(self):
        """Close, and say in the server's log what is open before and after."""
        self.kept = None
        before = self.cuda.live
        self.session.close()
        pb_utils.Logger.log_info(f"closed the session: {before} became {self.cuda.live}")

    def launch(self, function, *arrays):
        def run(*memories):
            function(*memories)
            self.finished += 1

        self.launched += 1
        kernel(run, *arrays)

    def do_double(self, call):
        """Every output = 2 X, on the GPU wherever they lie."""
        x = call.input("X")
        for name in filter(call.requested, self.outputs):
            y = call.device_output(name, x.shape, x.dtype)
            with call.stream:
                self.launch(double, call.to_device(x), y.cupy())

    def do_double_where_it_is_wanted(self, call):
        """Y = 2 X, on the GPU or on the host."""
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        if isinstance(y, DeviceView):
            with call.stream:
                self.launch(double, call.to_device(x), y.cupy())
        else:
            double(call.to_host(x), y.numpy())

    def do_double_in_memory_of_its_own(self, call):
        x = call.input("X")
        with call.stream:
            y = self.cuda.empty(x.shape, x.dtype)
            self.launch(double, call.to_device(x), y)
            call.put("Y", y)

    def do_double_on_the_host(self, call):
        call.put("Y", call.to_host(call.input("X")) * 2)

    def do_double_behind_the_gate(self, call):
        """Y = 2 X, when the test lets the model go."""
        x, y = call.input("X"), call.device_output("Y", call.input("X").shape, np.float32)
        wait_at_the_gate(call.parameters)
        with call.stream:
            self.launch(double, x.cupy(), y.cupy())

    def do_launch_what_waits_at_the_gate(self, call):
        """Y = 2 X, when the test lets the GPU go, which the model does not wait for."""
        x, y = call.input("X").cupy(), call.device_output("Y", call.input("X").shape, np.float32).cupy()
        parameters = call.parameters
        with call.stream:
            self.launch(lambda _: wait_at_the_gate(parameters), y)
            self.launch(double, x, y)

    def do_copy_behind_the_gate(self, call):
        """Keep a copy of X, made when the test lets the GPU go, which the model does not wait for."""
        x, parameters = call.input("X").cupy(), call.parameters
        with call.stream:
            copied = self.kept = self.cuda.empty(x.shape, x.dtype)
            self.launch(lambda _: wait_at_the_gate(parameters), x)
            self.launch(lambda x, copied: np.copyto(copied, x), x, copied)
        call.put("Y", call.input("X"))

    def do_pass_through(self, call):
        call.put("Y", call.input("X"))

    def do_pass_a_part_through(self, call):
        call.put("Y", call.input("X").cupy()[1:-1])

    def do_repeat(self, call):
        """Three times X, one after another."""
        x = call.input("X")
        y = call.output("Y", (3 * x.shape[0],), x.dtype)
        values = np.tile(call.to_host(x), 3)
        if isinstance(y, DeviceView):
            y.cupy()[:] = values
        else:
            y.numpy()[:] = values

    def do_fail_after_launching(self, call):
        self.do_double(call)
        raise RuntimeError("the model gave up late")

    def do_launch_what_fails(self, call):
        with call.stream:
            self.launch(fail, call.device_output("Y", call.input("X").shape, np.float32).cupy())

    def do_answer_while_it_runs(self, call):
        """Write 42, wait until somebody writes to the input, and answer that."""
        question, answer = call.input("X").cupy(), call.output("Y", (2,), np.float32).cupy()
        answer.peek()[0] = 42
        deadline = time.monotonic() + PATIENCE_S
        while question.peek()[1] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        answer.peek()[1] = question.peek()[1] + 1

    def do_keep(self, call):
        """Keep an array over the client's memory."""
        self.kept = call.input("X").cupy()
        call.put("Y", call.input("X"))

    def do_tell_what_was_kept(self, call):
        call.put("Y", self.kept.get())

    def do_tell_attributes(self, call):
        """Tell the memory type, the device and the size of X, and whether it came with a handle."""
        attributes = call.input("X").attributes
        has_handle = attributes.cuda_ipc_handle is not None
        told = [attributes.memory_type, attributes.memory_type_id, attributes.byte_size, has_handle]
        call.put("Y", np.array(told, np.float32))

    def do_tell_what_is_pinned(self, call):
        """Tell where X begins in the range that was pinned last, and how large that is."""
        address = call.input("X").numpy().ctypes.data
        begin, byte_size = [pinned for name, pinned in self.cuda.log if name == "pin"][-1]
        call.put("Y", np.array([address - begin, byte_size], np.float32))

    def do_export(self, call):
        """Allocate memory, and give its handle away."""
        self.own = self.cuda.allocate(1 << 16)
        call.put("Y", np.frombuffer(self.cuda.export(self.own), np.uint8).astype(np.float32))

    def do_fail_next(self, call):
        """Let CUDA fail the next times that it is asked for something."""
        for _ in range(call.parameters["times"]):
            self.cuda.fail_next(call.parameters["method"], call.parameters["name"])
        self.do_tell(call)

    def do_let_go(self, call):
        """Drop what was kept or allocated, and sweep."""
        self.kept = None
        if self.own is not None:
            self.cuda.free(self.own)
            self.own = None
        self.do_sweep(call)

    def do_sweep(self, call):
        """Unmap at once what would be unmapped in some seconds."""
        self.session._open_context().resolver.sweep()
        self.do_tell(call)

    def do_tell(self, call):
        """Tell how often CUDA was asked for what, and what is open now."""
        names = [name for name, _ in self.cuda.log]
        live = self.cuda.live
        told = [names.count("open"), names.count("synchronize"), names.count("pin"), self.launched, self.finished]
        call.put("Y", np.array([*told, live.opened, live.allocations, live.pinned], np.float32))


def wait_at_the_gate(parameters):
    go = os.open(parameters["go"], os.O_RDONLY | os.O_NONBLOCK)
    Path(parameters["arrived"]).write_bytes(b"here")  # opens when the test does
    select.select([go], [], [], PATIENCE_S)
    os.close(go)


def fail(_):
    raise CudaError("a kernel", "cudaErrorIllegalAddress")
