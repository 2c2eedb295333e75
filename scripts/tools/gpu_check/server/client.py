"""Clients of the check's own models: in processes of a harness for level 1, on a real server for level 2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient

import shm_backend_utils
from shm_backend_utils.cli.common.server import REPOSITORY, copy_models, models_in, temporary_server
from shm_backend_utils.client import PoolOptions, PreparedCall, Result, ShmClient
from shm_backend_utils.gpu.arrays.device_array import DeviceArray, viewed
from shm_backend_utils.server import EmbeddedServer, Installation
from shm_backend_utils.testing.harness import ModelHarness

from ... import ROOT
from ...figures import Figure
from ..gpu import Gpu
from ..kernels import Gate
from ..report import Amounts, CheckFailedError, ratio, require

COUNT: Final = 2**19
DEVICE: Final = "cuda:0"
NUMBERS: Final = np.arange(COUNT, dtype=np.float32)
MORTAL: Final = "gpu_mortal"
"""The model whose process is killed; it answers early."""
HELD_S: Final = 0.2
"""How long a gate stays closed, when all is launched: who does not wait has read or written long before."""

_EMPTY: Final = ROOT / "scripts" / "tools" / "bench" / "models" / "empty"
"""A model that does nothing, without this library."""
_GPU_CHECK: Final = Path(__file__).resolve().parents[1]
_STAND_IN: Final = Path(__file__).with_name("stand_in.py")
_KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "work": {},
    "early": {"SHM_GPU_EVENTS": "true"},
    "pinned": {"SHM_PIN_HOST_MEMORY": "true"},
}
_POOL: Final = PoolOptions(lend_bytes=2**20)  # so that the check's own tensors are used in place


def write_models(folder: Path, *, libraries: Sequence[str], gate: Gate, is_fake: bool, is_served: bool) -> Path:
    """Write the models to a folder, and return it; on a server, each has this package with it."""
    samples = [REPOSITORY / name for name in ("gpu_multiply", "gpu_normalize") if "cupy" in libraries]
    copy_models([*samples, *models_in(_GPU_CHECK / "models"), *([_EMPTY] if is_served else [])], folder)
    common = {"GATE": str(gate.file)}
    for library in libraries:
        for kind, parameters in _KINDS.items():
            _copy_as(folder, f"gpu_{kind}_{library}", "FP32", {"LIBRARY": library, **common, **parameters})
    _copy_as(folder, MORTAL, "FP32", {"LIBRARY": "neither", **common, **_KINDS["early"]})
    for name in ("BF16", "BOOL"):
        _copy_as(folder, f"gpu_pass_{name.lower()}", name, {"LIBRARY": "neither", **common})
    shutil.rmtree(folder / "gpu_work")
    for model in models_in(folder):
        config = model / "config.pbtxt"
        is_of_a_gpu = "KIND_GPU" in config.read_text()
        if is_fake or not is_served:
            # A harness has no GPUs for models: they open theirs.
            config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
        _add_code(model / "1", has_stand_in=is_fake and is_of_a_gpu, has_package=is_served)
    return folder


def _copy_as(folder: Path, name: str, data_type: str, parameters: Mapping[str, str]) -> None:
    """Copy ``gpu_work`` under another name, with another type in its configuration, and parameters."""
    shutil.copytree(folder / "gpu_work", folder / name)
    config = folder / name / "config.pbtxt"
    text = config.read_text().replace("TYPE_FP32", f"TYPE_{data_type}")
    lines = [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    config.write_text("\n".join([text, *lines, ""]))


def _add_code(home: Path, *, has_stand_in: bool, has_package: bool) -> None:
    """Put a fake GPU before a model's code if it needs one that is not there, and this package beside it."""
    files = ["kernels.py"]
    if has_stand_in:
        (home / "model.py").rename(home / "replaced_model.py")
        shutil.copy(_STAND_IN, home / "model.py")
        files.append("fakes.py")
    if has_package:
        package = home / _GPU_CHECK.relative_to(ROOT)  # where the model imports it from
        copy_models([Path(shm_backend_utils.__file__).parent], home)
        package.mkdir(parents=True)
        for file in files:
            shutil.copy(_GPU_CHECK / file, package)


@dataclass(frozen=True)
class ServerClient:
    gpu: Gpu  # this process', with one library
    gate: Gate  # that the models' processes have, too
    server: Any  # what clients connect to
    shm: ShmClient
    others: ThreadPoolExecutor  # for calls that are to wait
    amounts: Amounts

    def model(self, kind: str) -> str:
        return f"gpu_{kind}_{self.gpu.kernels.name}"

    @property
    def pitches(self) -> list[int]:
        """The pitches to try, without those for which this GPU is small: three rows are to fit in a sixteenth."""
        return [pitch for pitch in self.amounts.pitches if 32 * pitch <= self.gpu.runtime.total_bytes(0)]

    def another(self, pool: PoolOptions = _POOL) -> ShmClient:
        return ShmClient(self.server, cuda=self.gpu.access, pool=pool)

    def infer(self, x: Any, *, kind: str = "work", count: int = COUNT, **options: Any) -> Result:
        """Have the model work on its input, with the output on the GPU."""
        room = {"OUTPUT0": ((count,), np.float32, DEVICE)}
        return self.shm.infer(self.model(kind), {"INPUT0": x}, outputs=room, **options)

    def prepared(self, kind: str = "work", count: int = COUNT, **parameters: Any) -> PreparedCall:
        place = (count,), np.float32, DEVICE
        model = MORTAL if kind == MORTAL else self.model(kind)
        return self.shm.prepare(model, {"INPUT0": place}, outputs={"OUTPUT0": place}, parameters=parameters)

    def launched(self, answer: Future[Any]) -> int:
        """Wait until a model has launched all work of a call, and return its process; raises what the call raises."""
        wait_until(lambda: bool(self.gate.launched_by) or answer.done(), "no model has launched its work")
        if not self.gate.launched_by:
            answer.result()
        return self.gate.launched_by

    @contextlib.contextmanager
    def renewed(self) -> Iterator[ServerClient]:
        """Have another client of the same for a block."""
        with self.another() as shm:
            yield dataclasses.replace(self, shm=shm)

    def filled(self, values: npt.NDArray[Any] = NUMBERS) -> Any:
        """Return the library's own tensor with these numbers, and nothing left to be written."""
        tensor = self.gpu.kernels.tensor(values.size, 0)
        self.gpu.upload(self.gpu.described(tensor), values)
        return tensor

    def array(self, values: npt.NDArray[Any]) -> DeviceArray:
        """Return these values, of any type and shape, in memory that the library has allocated."""
        array = viewed(self.gpu.new(values.nbytes // 4), shape=values.shape, dtype=values.dtype)
        self.gpu.upload(array, values)
        return array

    def found(self, array: Any) -> npt.NDArray[Any]:
        """Return what is in an array when all is done."""
        described = self.gpu.described(array)
        self.gpu.settle()
        return self.gpu.download(described)

    def require_values(self, array: Any, expected: npt.ArrayLike, what: str = "the output") -> None:
        require(bool((self.found(array) == expected).all()), f"{what} is wrong")

    def require_quick(self, result: Any, numbers: npt.NDArray[np.float32] = NUMBERS, what: str = "the output") -> None:
        self.require_values(result["OUTPUT0"], self.gpu.kernels.after_quick(numbers), what)

    def free_unused(self) -> None:
        """Free all memory of GPUs that this process does not use; CheckFailedError if some is left."""
        gc.collect()
        wait_until(lambda: not self.gpu.access.collect(), "memory that nobody uses is not freed")


def wait_until(condition: Callable[[], bool], otherwise: str, patience_s: float = 20.0) -> float:
    """Wait for a condition, and return how long it took; CheckFailedError if it does not come."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > begin + patience_s:
            raise CheckFailedError(f"{otherwise}, after {patience_s:g} s")
        time.sleep(0.005)
    return time.monotonic() - begin


@dataclass(frozen=True)
class TritonClient(ServerClient):
    bare: Any
    triton: EmbeddedServer
    # closed when the server has ended. What is registered there by its handle is freed then, as Triton unmaps some time
    # after it has been told to
    after_server: contextlib.ExitStack

    def infer_nothing(self) -> None:
        self.bare.infer(_EMPTY.name, [])


def over_empty(what: str, medians: Mapping[str, float], **limits: Any) -> list[Figure]:
    return [
        ratio(f"{what} of {name}", median, medians["empty"], "× an empty request", **limits)
        for name, median in medians.items()
        if name != "empty"
    ]


@contextlib.contextmanager
def harness_clients(gpus: Sequence[Gpu], gate: Gate, amounts: Amounts) -> Iterator[list[ServerClient]]:
    """Run all models for a block, each in a process of its own, without a server, and make a client with each GPU."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        libraries = [gpu.kernels.name for gpu in gpus]
        write_models(folder, libraries=libraries, gate=gate, is_fake=gpus[0].is_fake, is_served=False)
        harness = stack.enter_context(ModelHarness.in_child(*models_in(folder)))
        others = stack.enter_context(ThreadPoolExecutor())
        shm = [stack.enter_context(ShmClient(harness, cuda=gpu.access, pool=_POOL)) for gpu in gpus]
        yield [ServerClient(gpu, gate, harness, each, others, amounts) for gpu, each in zip(gpus, shm, strict=True)]


@contextlib.contextmanager
def triton_clients(
    gpus: Sequence[Gpu], gate: Gate, amounts: Amounts, installation: Installation
) -> Iterator[list[TritonClient]]:
    """Run a server for a block, with models that work by the libraries of all these, and make a client with each."""
    libraries = [gpu.kernels.name for gpu in gpus]
    models = functools.partial(write_models, libraries=libraries, gate=gate, is_fake=gpus[0].is_fake, is_served=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(temporary_server("gpu-check", models, installation=installation, numpy="own"))
        after_server = stack.enter_context(contextlib.ExitStack())
        bare = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
        others = stack.enter_context(ThreadPoolExecutor())
        url = server.grpc_url
        shm = [stack.enter_context(ShmClient(url, cuda=gpu.access, pool=_POOL)) for gpu in gpus]
        yield [
            TritonClient(gpu, gate, url, each, others, amounts, bare, server, after_server)
            for gpu, each in zip(gpus, shm, strict=True)
        ]
        server.stop()  # no model has the clients' memory mapped then: they free it when they are closed


Check = Callable[[ServerClient], str | None]
"""Returns a detail for the report, or none; raises what the report understands."""
TritonCheck = Callable[[TritonClient], str | None]
