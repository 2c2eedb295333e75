"""Does what the parameter `deed` says on a GPU that does not exist. It never waits for what it has launched."""

import time

import numpy as np

from shm_backend_utils.model import Call, ShmSession
from shm_backend_utils.model.device_view import DeviceView
from shm_backend_utils.region.cuda import CudaAccess
from shm_backend_utils.region.cuda_runtime import CudaError
from shm_backend_utils.testing.fake_cuda import FakeCuda, kernel

PATIENCE_S = 10


def double(x, y):
    np.multiply(x, 2, out=y)


class TritonPythonModel:
    def initialize(self, args):
        self.cuda = FakeCuda()
        self.session = ShmSession.from_args(args, cuda=CudaAccess(lambda: self.cuda))
        self.kept = None

    def execute(self, requests):
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        getattr(self, f"do_{call.parameters['deed']}")(call)

    def finalize(self):
        self.kept = None
        self.session.close()

    def do_double(self, call):
        """Y = 2 X, on the GPU wherever the two lie."""
        x = call.input("X")
        y = call.device_output("Y", x.shape, x.dtype)
        with call.stream:
            kernel(double, call.to_device(x), y.cupy())

    def do_double_where_it_is_wanted(self, call):
        """Y = 2 X, on the GPU or on the host."""
        x = call.input("X")
        y = call.output("Y", x.shape, x.dtype)
        if isinstance(y, DeviceView):
            with call.stream:
                kernel(double, call.to_device(x), y.cupy())
        else:
            double(call.to_host(x), y.numpy())

    def do_double_in_memory_of_its_own(self, call):
        x = call.input("X")
        with call.stream:
            y = self.cuda.empty(x.shape, x.dtype)
            kernel(double, call.to_device(x), y)
            call.put("Y", y)

    def do_double_on_the_host(self, call):
        call.put("Y", call.to_host(call.input("X")) * 2)

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
        self.do_double(call)
        with call.stream:
            kernel(fail, call.device_output("Y", call.input("X").shape, np.float32).cupy())

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

    def do_let_go(self, call):
        """Drop that array, and unmap at once what would be unmapped in some seconds."""
        self.kept = None
        self.do_sweep(call)

    def do_sweep(self, call):
        self.session._plans.sweep()
        self.do_tell(call)

    def do_fail_to_open(self, call):
        """Let the next openings of handles fail, as if their owner had freed the memory."""
        for _ in range(call.parameters["times"]):
            self.cuda.fail_next("open", "cudaErrorInvalidResourceHandle")
        self.do_tell(call)

    def do_tell(self, call):
        """Tell how often handles were opened and streams were waited for, and how much is open now."""
        names = [name for name, _ in self.cuda.log]
        opened, waited = names.count("open"), names.count("synchronize")
        call.put("Y", np.array([opened, waited, self.cuda.live.opened, self.cuda.live.allocations], np.float32))


def fail(_):
    raise CudaError("a kernel", "cudaErrorIllegalAddress")
