"""The methods of both clients: inference, and the server's health and models under tritonclient's method names."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, TypeVar

from ..errors import ClosedError
from ..gpu.memory.access import CudaAccess
from ..memory.pool.options import PoolOptions
from .calls import prepare
from .core import ClientMemory, Core
from .errors import ForkedError
from .explanation import ClientStats
from .inputs.sources import InputDescription, Outputs
from .options import LibraryName, PathName, RequestOptions, Tls, check_keywords
from .prepared import OfThisProcess
from .server_calls import ask, is_model_ready, is_so, load, unload
from .settings import ClientSettings
from .short import begin
from .split import infer_split
from .steps import Steps
from .streams import OpenStream, open_stream
from .transports.transport import Connectable

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ClientMethods"]

ResultT = TypeVar("ResultT")
PreparedT = TypeVar("PreparedT")
StreamT = TypeVar("StreamT")
ExplanationT = TypeVar("ExplanationT")
BoolT = TypeVar("BoolT")
DictT = TypeVar("DictT")
NoneT = TypeVar("NoneT")

_NO_FILES: Final[Mapping[str, bytes]] = {}


class ClientMethods(OfThisProcess, ABC, Generic[ResultT, PreparedT, StreamT, ExplanationT, BoolT, DictT, NoneT]):
    """The methods of both clients. :class:`ShmClient` returns values; :class:`AsyncShmClient` returns coroutines.

    The methods from ``is_server_live`` to ``unload_model`` take ``timeout_s``: how long the server may take, in
    seconds; the default is the client's. They raise InferenceError if the server refuses, and DeadlineExceededError or
    ServerUnavailableError if it does not answer. Answers consist of JSON's types, and have the same shape over gRPC
    and HTTP.
    """

    _core: Core | None = None
    _driver: Any
    _run: Any  # runs an operation; returns the result, or a coroutine that does
    _kind_of_prepared: ClassVar[Any]
    _most_bytes: ClassVar[float]  # the inputs of a short call have fewer bytes

    def __init__(
        self,
        url: str | Connectable,
        *,
        timeout_s: float = 60.0,
        path: PathName = "auto",
        pool: PoolOptions | None = None,
        tls: Tls | None = None,
        cuda: CudaAccess | None = None,
        wait_ready_s: float | None = None,
        inline_bytes: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_keywords(type(self).__name__, unknown)
        self._settings = ClientSettings(url, timeout_s, path, tls, wait_ready_s, inline_bytes)
        self._memory = ClientMemory(self, pool or PoolOptions(), cuda or CudaAccess())
        self._core = Core(self._memory)
        self._begin()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        split: bool = False,
        cuda_stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> ResultT:
        """Run a model. On the direct path its inputs are copied once, into shared memory, and its outputs not at all.

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Maps input names to values. A value is a NumPy array in any memory order, or another array on the host with
            ``__dlpack__``, ``__array_interface__`` or ``__array__``. It may be a list of these, a tensor on a GPU with
            ``__dlpack__`` or ``__cuda_array_interface__``, or Python numbers and strings. Arrays must have the model's
            dtype and no masked elements. In a list, arrays with one dimension less than the input are its rows. If the
            model takes batches, arrays with as many dimensions as the input are parts of one batch. The direct path
            uses a tensor on a GPU in place if it has at least ``PoolOptions.lend_bytes`` bytes and CUDA IPC can share
            it. Models can then see the whole allocation that it is part of.
        outputs : iterable of str or mapping, optional
            The outputs that you want, one or more; by default all. A mapping also gives the room for each: bytes,
            ``(shape, dtype)``, or None. If neither this nor the configuration tells the size, the client learns it from
            the first call, whose output comes back through Triton. ``"cuda:0"``, or ``(shape, dtype, "cuda:0")``, puts
            the output on that GPU; all others come to the host, even if the inputs are on a GPU.
        timeout_s : float, optional
            The time limit of the whole call, in seconds, except for the steps that :class:`ShmClient` names; by
            default the client's.
        path : str, optional
            As in :class:`ShmClient`; by default the client's.
        split : bool
            Whether to send a batch that is too large for the model as several requests, side by side.
        cuda_stream : object, optional
            The streams of your work that writes inputs on GPUs, or still reads earlier results there. Give a stream of
            torch or CuPy, any object with ``__cuda_stream__``, a ``CUstream`` as a number, an event, or a sequence of
            these. The call waits only for these, and they wait for outputs that the model's GPU is still writing. By
            default the call waits for all work of this process on the call's GPUs, and it is a CallerError if a stream
            is being captured into a graph.
        library : str, optional
            The library of the arrays of outputs on GPUs: ``"torch"``, ``"cupy"``, ``"jax"`` or ``"numba"``. By default
            that of the inputs on GPUs, else :class:`DeviceArray`, which all four can import.
        **options
            See :class:`RequestOptions`.

        Returns
        -------
        Result
            Maps output names to arrays with the shapes and dtypes that the model gave. Outputs in shared memory are
            views of it. No other call uses that memory until the result and its arrays are gone.

        Raises
        ------
        CallerError, TypeError
            An argument cannot be sent.
        TensorError
            The model does not take these tensors.
        PathUnavailableError
            The path that you asked for is closed; the message says why.
        PoolExhaustedError, BudgetError, MachineError
            There is not enough shared memory: now, ever, or on this machine.
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            The server did not answer in time, or cannot be reached.
        """
        core = self._core
        if core is None or core.is_forked:
            core = self._open_core()  # raises the error that says why
        settings = self._settings.of_call("infer", model, path, timeout_s, options, cuda_stream, library)
        if split:
            return self._run(infer_split(core, settings, inputs, outputs), core.tally)
        return self._run(functools.partial(begin, core, settings, inputs, outputs, self._most_bytes), core.tally)

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, InputDescription],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> PreparedT:
        """Return a call whose inputs you fill in place; the direct path then copies no tensor.

        Parameters
        ----------
        model, outputs, path, **options
            As in :meth:`infer`; the options apply to every request of the call.
        inputs : mapping
            Maps input names to ``(shape, dtype)``, or ``(shape, dtype, "cuda:0")`` for memory on a GPU. The shape
            consists of whole numbers, and includes the batch dimension if the model has one. For strings, dtype
            ``"S20"`` keeps room for 20 bytes each, on average. A value may also be a tensor on a GPU: it is then the
            input's memory as long as the call lives. On the direct path it must be C-contiguous and of a kind that CUDA
            IPC can share, and models see the whole allocation that it is part of.
        timeout_s : float, optional
            The time limit of this method, and of each :meth:`PreparedCall.infer`, in seconds; by default the client's.
        library : str, optional
            The library of the arrays of inputs that you fill on GPUs, and of outputs there; as in :meth:`infer`.

        Returns
        -------
        PreparedCall
            It owns its memory until it is closed, and takes more after outputs of unknown size found no room. Its
            arrays are not cleared. ``prepare`` raises the errors of :meth:`infer`, except those of the server's answer.
        """
        core, timeout_s = self._open_core(), self._settings.timeout_of(timeout_s)
        settings = self._settings.of_call("prepare", model, path, timeout_s, options, library=library)

        def prepared() -> Steps[Any]:
            driver = self._driver  # read now: another thread may close the client later
            call = yield from prepare(core, settings, inputs, outputs)
            return self._kind_of_prepared(core, call, timeout_s, driver)

        return self._run(prepared())

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        frames: int | None = None,
        cuda_stream: Any = None,
        library: LibraryName | None = None,
        **options: Unpack[RequestOptions],
    ) -> StreamT:
        """Return the responses of a decoupled model as they come. This needs gRPC.

        On the direct path the responses lie in a ring of ``frames`` places. If the next place is still in use, the
        model waits for some time, until you release the result there and its arrays are gone. So keep fewer results
        than there are frames, or keep copies.

        A response that finds too little room comes back through Triton, and the client's next stream has room for it.

        Parameters
        ----------
        model, inputs, outputs, path, cuda_stream, library, **options
            As in :meth:`infer`, but tensors on GPUs are copied through the host. An output's room is for one response.
        timeout_s : float, optional
            The longest wait for each response, in seconds; by default the client's. The stream as a whole has no time
            limit.
        frames : int, optional
            How many responses of a decoupled model may lie in shared memory at once, 1 to 64; by default 8, or 4
            if 8 would take more than ``PoolOptions(stream_guess_bytes=...)``.

        Returns
        -------
        iterator of Result
            The request is sent when you ask for the first result. Each result's arrays are valid as long as they live.
            To stop early, ``close()`` the iterator, or drop it. It raises the errors of :meth:`infer`, and CallerError
            over HTTP; for arguments that cannot be sent, this method itself raises. DeadlineExceededError means that no
            response came in time: the model may be waiting for you to release results.
        """
        core = self._open_core()
        settings = self._settings.of_call("stream", model, path, timeout_s, options, cuda_stream, library)
        timeout_s = self._settings.timeout_of(timeout_s)
        return self._responses(core, open_stream(core, settings, inputs, outputs, frames, timeout_s))

    def explain(self, model: str, *, model_version: str = "") -> ExplanationT:
        """Check anew which path calls of a model take, and why.

        Printed, the answer is a table: one line for each condition, with the remedy. By default the server chooses the
        version. Raises InferenceError if the server has no such model.
        """
        deadline = time.monotonic() + self._settings.timeout_s
        return self._run(self._open_core().explain(model, model_version, deadline))

    def stats(self) -> ClientStats:
        """Return a snapshot of this client's counters."""
        return self._open_core().stats()

    def is_server_live(self, *, timeout_s: float | None = None) -> BoolT:
        """Return whether the server is up. Raises ServerUnavailableError if no server answers."""
        return self._ask(timeout_s, is_so, "server live")

    def is_server_ready(self, *, timeout_s: float | None = None) -> BoolT:
        """Return whether the server is up and has loaded its models."""
        return self._ask(timeout_s, is_so, "server ready")

    def is_model_ready(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> BoolT:
        """Return whether a model is loaded and its processes are alive; of an ensemble, whether its steps are ready.

        Triton before 26.01 reports a model as ready even if its process has died. So this method looks for the
        processes of a Python model, if this process can see them. It also asks the model's session for a sign of life;
        ``model.py`` does not see that request. A model whose ``call.forward`` finds no memory is not ready either.

        Raises
        ------
        DeadlineExceededError
            The model was busy for longer than ``timeout_s``: the question waits for its turn.
        LivenessUnknownError
            A Python model gave no sign of life, on a server before 26.01 whose processes this process cannot see.
        """
        return self._ask(timeout_s, is_model_ready, model, model_version)

    def get_server_metadata(self, *, timeout_s: float | None = None) -> DictT:
        """Return the server's name, version and extensions."""
        return self._ask(timeout_s, ask, "server metadata")

    def get_model_metadata(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> DictT:
        """Return a model's versions, inputs and outputs."""
        return self._ask(timeout_s, ask, "model metadata", model, model_version)

    def get_model_config(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> DictT:
        """Return a model's configuration, as the server has completed it."""
        return self._ask(timeout_s, ask, "model config", model, model_version)

    def get_inference_statistics(
        self, model: str = "", model_version: str = "", *, timeout_s: float | None = None
    ) -> DictT:
        """Return the server's statistics of a model, or of all models: ``{"model_stats": [...]}``."""
        return self._ask(timeout_s, ask, "model statistics", model, model_version)

    def load_model(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
        timeout_s: float | None = None,
    ) -> NoneT:
        """Load or reload a model, on a server with ``--model-control-mode=explicit``.

        ``config``, as JSON, replaces the configuration in the repository. ``files`` replace the model's files there,
        and need ``config``: ``{"file:1/model.py": b"..."}``.
        """
        return self._ask(timeout_s, load, model, config, files)

    def unload_model(self, model: str, *, unload_dependents: bool = False, timeout_s: float | None = None) -> NoneT:
        """Unload a model; ``unload_dependents`` also unloads an ensemble's steps. Requests under way end first."""
        return self._ask(timeout_s, unload, model, unload_dependents)

    def __repr__(self) -> str:
        core = self._core
        state = "closed" if core is None else core.state
        needs_grpcio = core.codec.needs_grpcio if core is not None and state == "open" else None
        wire = "" if needs_grpcio is None else f" wire={'grpcio' if needs_grpcio else 'sockets'}"
        return f"<{type(self).__name__} {vars(self).get('_settings', 'of no server')}{wire} {state}>"

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the connection, at the end of ``__init__``."""

    @abstractmethod
    def _responses(self, core: Core, opening: Steps[OpenStream]) -> StreamT:
        """Open a stream, and return its responses as they come."""

    def _ask(self, timeout_s: float | None, call: Any, *named: Any) -> Any:
        core, deadline = self._open_core(), time.monotonic() + self._settings.timeout_of(timeout_s)
        return self._run(call(core.codec, deadline, *named))

    def _open_core(self) -> Core:
        if self._core is None:
            raise ClosedError("this client")
        if self._core.is_forked:
            raise ForkedError("this client")
        return self._core
