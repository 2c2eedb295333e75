"""A CUDA driver without a GPU, on which NVIDIA's own ``cuda-bindings`` run: in any number of processes.

It keeps CUDA's documented rules where code can break them. Threads do the work on streams after a delay. New memory is
filled with garbage. Host code that touches device memory crashes. A handle opens only where CUDA documents it. Uses
that CUDA leaves undefined are recorded (:meth:`FakeDriver.violations`). Its timing says nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import MachineError
from ...gpu.runtime import CudaRuntime
from .tensor import Tensor, new_tensor

__all__ = ["FakeDriver", "LiveCounts", "Tensor", "library"]

_SOURCES: Final = Path(__file__).parent / "libcuda"
_NAME: Final = "libcuda.so.1"  # by which cuda-bindings ask for it
_FLAGS: Final = (
    *("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *(f"-Wl,-soname,{_NAME}", "-Wl,-z,defs", "-Wl,-Bsymbolic"),
)

_ALL: Final = -1
_PROCESSES: Final = 16
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def library() -> Path:
    """Build the library if necessary, and return it; processes load it if ``LD_LIBRARY_PATH`` has its folder."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    state = hashlib.sha256(repr(_FLAGS).encode())
    for source in sources:
        state.update(source.name.encode() + b"\0" + source.read_bytes())
    built = _own_folder() / state.hexdigest()[:16] / _NAME
    if not built.exists():
        _build([source for source in sources if source.suffix == ".c"], built)
    return built


def _own_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"shm-backend-utils-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise MachineError(
            f"{folder} is not this user's alone, so no library is loaded from there; remove it, or set TMPDIR"
        )
    return folder


def _build(sources: list[Path], built: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise MachineError("the fake CUDA driver is built from C, but neither gcc nor cc was found; install gcc")
    built.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / _NAME
        command = [compiler, *_FLAGS, "-o", str(made), *map(str, sources), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(f"{compiler} could not build the fake CUDA driver; it says: {done.stderr[:2000]}")
        made.replace(built)  # a build at the same time puts the same there


class LiveCounts(NamedTuple):
    """Objects that were not released; ``LiveCounts()`` means none."""

    allocations: int = 0  # memory of devices, managed memory, and what is left of virtual memory
    opened: int = 0  # how often handles of memory were opened and not closed, and mappings of imported memory
    events: int = 0  # those that were made, and not destroyed
    streams: int = 0
    pinned: int = 0  # ranges of host memory


class FakeDriver:
    """The fake driver in this process, with methods for tests. Each operating-system process has its own state.

    A virtual process is a number from 0 to 15; other virtual processes see its objects as those of another process.

    The library reads these variables when it is loaded, also in processes that find it through ``LD_LIBRARY_PATH``:

    - ``SHM_FAKE_CUDA_DEVICES``: the number of GPUs (2; at most 8).
    - ``SHM_FAKE_CUDA_UUIDS``: their UUIDs, 32 hexadecimal digits each, separated by commas.
    - ``SHM_FAKE_CUDA_MEMORY_BYTES``: the memory of each, for this process (4 GiB).
    - ``SHM_FAKE_CUDA_DELAY_US``: the delay before each piece of work on a stream (200).
    - ``SHM_FAKE_CUDA_IPC_US``: how long it takes to open or to close a handle of memory (50).
    - ``SHM_FAKE_CUDA_CONTEXT_BYTES``: the memory that each context takes (524 MiB).
    - ``SHM_FAKE_CUDA_FORGIVES``: names, separated by commas, as for :meth:`forgive`.
    - ``SHM_FAKE_CUDA_DRIVER_VERSION``: CUDA's version (13000); functions that came later are not found.
    - ``SHM_FAKE_CUDA_PID_NAMESPACE``, ``SHM_FAKE_CUDA_PID``: the values in this process' handles.
    - ``SHM_FAKE_CUDA_LACKS``: features that its GPUs lack, separated by commas, as for :meth:`lack`.
    - ``SHM_FAKE_CUDA_FAIL``: ``function:error:times``, separated by commas, as for :meth:`fail_next`.
    - ``SHM_FAKE_CUDA_VIOLATIONS``: the file to which violations are appended, too.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native
        self._native.fake_cuda_memory.restype = ctypes.c_void_p
        self._native.fake_cuda_count.restype = ctypes.c_uint64
        self._launched: dict[int, Callable[[], object]] = {}
        self._number = itertools.count(1)

    @classmethod
    def load(cls) -> FakeDriver:
        """Load the fake as this process' CUDA driver, before CUDA is used; MachineError if another is loaded."""
        native = _loaded_driver() or ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
        if not _is_fake(native):
            raise MachineError("this process has loaded another libcuda.so.1; load the fake one before CUDA is used")
        return cls(native)

    @classmethod
    def loaded(cls) -> FakeDriver | None:
        """Return the fake driver of this process, or None if it has loaded none."""
        native = _loaded_driver()
        return cls(native) if native is not None and _is_fake(native) else None

    def bindings(self, process: int = 0) -> Any:
        """Return the ``cuda.bindings.driver`` of a virtual process."""
        return _Bindings(self._native, process)

    def runtime(self, process: int = 0) -> CudaRuntime:
        """Return a new :class:`.CudaRuntime` of a virtual process."""
        return CudaRuntime(driver=self.bindings(process))

    def delay(self, seconds: float) -> None:
        """Set the delay before each piece of work on a stream. Events and stream memory operations have none."""
        self._native.fake_cuda_set_delay(ctypes.c_uint64(round(seconds * 1e6)))

    def max_pitch(self, byte_size: int = 0) -> None:
        """Refuse copies of rows that are farther apart; 0 for CUDA's own limit, 2 GiB - 1."""
        self._native.fake_cuda_set_max_pitch(ctypes.c_size_t(byte_size))

    def forgive(self, *names: str) -> None:
        """Leave out behaviour of a real driver, by name; without names, leave out nothing.

        ``captures``: a call for a whole context ends all captures there. ``waits``: freeing memory, or closing a
        handle, waits for the device, and memory must not be unmapped before that. ``contexts``: a context takes memory.
        ``openings``: to open or to close a handle takes time.
        """
        if not self._native.fake_cuda_forgive(",".join(names).encode()):
            raise ValueError(f"the fake driver does not know all of {names}")

    def namespace(self, process: int, name: str, pid: int = 0) -> None:
        """Put a virtual process into a PID namespace, with a process id there; 0 means the real one."""
        self._native.fake_cuda_set_namespace(process, name.encode(), pid)

    def lack(self, *features: Literal["virtual memory", "descriptors"]) -> None:
        """Let the GPUs have no virtual memory, or none that descriptors share; without arguments, they have both."""
        self._native.fake_cuda_set_lacking(",".join(features).encode())

    def fail_next(self, function: str, error: str, times: int = 1, process: int | None = None) -> None:
        """Let the next calls of a driver function fail with a named error, in one virtual process or in any."""
        known = self._native.fake_cuda_fail_next(
            function.encode(), error.encode(), times, _ALL if process is None else process
        )
        if not known:
            raise ValueError(f"the fake driver has no function {function!r} that could fail by {error!r}")

    def count(self, function: str, process: int | None = None) -> int:
        """Return how often a function was called, failures included."""
        return int(self._native.fake_cuda_count(function.encode(), _ALL if process is None else process))

    def live(self, process: int | None = None) -> LiveCounts:
        """Return the objects that one virtual process, or all, did not release."""
        counts = (ctypes.c_int * 5)()
        self._native.fake_cuda_live(_ALL if process is None else process, counts)
        return LiveCounts(*counts)

    def depth(self, process: int | None = None) -> int:
        """Return how many contexts are on the calling thread's stack in a virtual process, or on all of its stacks."""
        return int(self._native.fake_cuda_depth(_ALL if process is None else process))

    def violations(self) -> list[str]:
        """Return the uses that CUDA leaves undefined, in this operating-system process."""
        found: list[str] = []
        text = ctypes.create_string_buffer(300)
        while self._native.fake_cuda_violation(len(found), text, ctypes.c_size_t(len(text))):
            found.append(text.value.decode())
        return found

    def end(self, process: int) -> None:
        """Kill a virtual process, whose number and runtimes must not be used again; pending work is never done."""
        self._native.fake_cuda_end(process)

    def forget(self) -> None:
        """Forget requested failures, counts of calls, and violations."""
        self._native.fake_cuda_forget()

    def launch(self, stream: int, function: Callable[[], object], process: int = 0) -> None:
        """Put a Python function, which must not call CUDA, on a stream, as a kernel; by default on device 0."""
        number = next(self._number)
        self._launched[number] = function
        bindings = self.bindings(process)
        address = ctypes.cast(self._run, ctypes.c_void_p).value
        with bindings.context():
            (error,) = bindings.cuLaunchHostFunc(stream, bindings.CUhostFn(address), number)
        if error:
            del self._launched[number]
            raise RuntimeError(f"cuLaunchHostFunc: {error.name}")

    @cached_property
    def _run(self) -> Any:
        function = _HostFunction(self._call_launched)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # a stream may call it after this object has ended
        return function

    def _call_launched(self, number: int) -> None:
        self._launched.pop(number)()

    def memory(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return device memory as it is now, whatever is on streams, as a writable NumPy array. Do not keep it."""
        kind = np.dtype(dtype)
        byte_size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if not byte_size:
            return np.empty(shape, kind)
        found = self._native.fake_cuda_memory(ctypes.c_size_t(address), ctypes.c_size_t(byte_size))
        if not found:
            raise ValueError(f"there is no device memory of {byte_size} bytes at {address:#x}")
        content = (ctypes.c_ubyte * byte_size).from_address(found)
        seen: npt.NDArray[Any] = np.ndarray(shape, kind, memoryview(content))
        return seen

    def tensor(self, values: npt.ArrayLike, **options: Any) -> Tensor:
        """Return a tensor of an invented array library, with these values; see :func:`.new_tensor`."""
        return new_tensor(self, values, **options)


class _Bindings:
    """``cuda.bindings.driver`` for a virtual process: the calling thread belongs to it during each call."""

    def __init__(self, native: ctypes.CDLL, process: int) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  # the fake has to be loaded before

        if not 0 <= process < _PROCESSES:
            raise ValueError(f"process {process}: expected a number from 0 to {_PROCESSES - 1}")
        self._native = native
        self._process = process
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            before = self._native.fake_cuda_process()
            self._native.fake_cuda_set_process(self._process)
            try:
                return found(*arguments)
            finally:
                self._native.fake_cuda_set_process(before)

        setattr(self, name, call)
        return call

    @contextlib.contextmanager
    def context(self, device: int | None = None) -> Iterator[None]:
        """Make a device current; None: device 0, if none is."""
        self.cuInit(0)
        if device is None and not self.cuCtxGetDevice()[0]:
            yield
            return
        error, context = self.cuDevicePrimaryCtxRetain(device or 0)
        if not error:
            (error,) = self.cuCtxPushCurrent(context)
        if error:
            raise RuntimeError(f"the fake driver's device {device or 0}: {error.name}")
        try:
            yield
        finally:
            self.cuCtxPopCurrent()


def _is_fake(native: ctypes.CDLL) -> bool:
    return hasattr(native, "fake_cuda_live")


def _loaded_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    except OSError:
        return None
