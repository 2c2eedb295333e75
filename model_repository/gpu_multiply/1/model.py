from typing import Any

from shm_backend_utils.memory.cuda.memory import CudaAccess
from shm_backend_utils.model import Call, ShmSession


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        cuda = CudaAccess()
        cuda.runtime.set_device(int(args["model_instance_device_id"]))  # says what is missing: CuPy, or a GPU
        import cupy  # noqa: PLC0415  # only now is it certain that there is one

        self.cupy = cupy
        self.session = ShmSession.from_args(args, cuda)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self.session.serve(requests, self.infer)

    def infer(self, call: Call) -> None:
        x = call.to_device(call.input("INPUT0"))  # no copy if it is on a GPU
        y = call.device_output("OUTPUT0", x.shape, x.dtype)
        with self.cupy.cuda.Device(y.device):  # the client's GPU may be another one than the instance's
            self.cupy.multiply(x, 2, out=y.cupy())

    def finalize(self) -> None:
        self.session.close()
