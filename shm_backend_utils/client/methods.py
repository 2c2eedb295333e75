"""The methods of both clients: inference, and by tritonclient's names the server's health and its models."""

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
    """Either client. :class:`ShmClient` returns the documented values; the others return coroutines of them.

    The methods that ask the server, but for inference, take ``timeout_s``: how long the server may take, in seconds;
    by default the client's own. A refusal of the server is an InferenceError; a missing answer is a
    DeadlineExceededError or ServerUnavailableError. Answers are in JSON's types, and of the same shape over gRPC and
    HTTP.
    """

    _core: Core | None = None
    _driver: Any
    _run: Any  # does an operation, and returns its result, or a coroutine of that
    _kind_of_prepared: ClassVar[Any]
    _most_bytes: ClassVar[float]  # from so many on, a copy gives way to others

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
            Name to value. A value is a NumPy array in any memory order, or another array on the host with
            ``__dlpack__``, ``__array_interface__`` or ``__array__``. It may be a list of these, a tensor on a GPU with
            ``__dlpack__`` or ``__cuda_array_interface__``, or Python numbers and strings. Arrays have the model's dtype
            and no masked element. Arrays of a list that have one dimension less than the input are its rows. Where the
            model takes batches, those with as many dimensions as the input are parts of one batch. On the direct path a
            tensor on a GPU is used where it is, if CUDA IPC can share it, and from ``PoolOptions.lend_bytes`` on;
            models can see the whole allocation that it is part of.
        outputs : iterable of str or mapping, optional
            The outputs wanted, one or more; all if not given. A mapping also says how much room each needs, as bytes,
            as ``(shape, dtype)``, or as None. Where neither this nor the configuration tells, the size is learned from
            the first call, whose output comes back through Triton. ``"cuda:0"``, or ``(shape, dtype, "cuda:0")``, has
            the output on that GPU; all others come to the host, also if the inputs are on a GPU.
        timeout_s : float, optional
            How long the whole call may take, in seconds, except for the steps that :class:`ShmClient` names; by
            default the client's own.
        path : str, optional
            As for the client.
        split : bool
            Whether a batch may be larger than the model takes at once: it is sent as several requests, side by side.
        cuda_stream : object, optional
            The streams of your work that writes inputs on GPUs, or still reads arrays of earlier results there. Each is
            a stream of torch or CuPy, anything with ``__cuda_stream__``, a ``CUstream`` as a number, or an event; a
            sequence of these is fine. The call waits for these alone, and these streams wait for outputs that the
            model's GPU still writes. By default the call waits for all work of this process on the call's GPUs.
        library : str, optional
            Whose arrays outputs on GPUs are: ``"torch"``, ``"cupy"``, ``"jax"`` or ``"numba"``; by default the one that
            inputs on GPUs are of, else :class:`DeviceArray`, which all of them take.
        **options
            See :class:`RequestOptions`.

        Returns
        -------
        Result
            Name to array, of the shapes and dtypes that the model gave. Views of this client's shared memory, where the
            outputs lie there; it is not used for another call before the result and its arrays are gone.

        Raises
        ------
        CallerError, TypeError
            An argument is none that can be sent.
        TensorError
            The model does not take these tensors.
        PathUnavailableError
            The path that was asked for is closed; the message says why.
        PoolExhaustedError, BudgetError, MachineError
            There is not enough shared memory: now, ever, or on this machine.
        InferenceError
            The server refused or failed the request.
        DeadlineExceededError, ServerUnavailableError
            It did not answer.
        """
        core = self._core
        if core is None or core.is_forked:
            core = self._open_core()  # which raises
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
        """Return a call whose inputs are to be filled in place: no copy at all on the direct path.

        Parameters
        ----------
        model, outputs, path, **options
            As of :meth:`infer`; the options are those of every request.
        inputs : mapping
            Name to ``(shape, dtype)``, or ``(shape, dtype, "cuda:0")`` for memory of a GPU. The shape has the batch
            dimension, where the model has one, and whole numbers alone. Strings are of dtype ``"S20"``: room for 20
            bytes each, on average. Or to a tensor on a GPU, which then is the input's memory as long as the call lives:
            C-contiguous, and of a kind that CUDA IPC can share, if the path is direct. Models see the whole allocation
            that it is part of.
        timeout_s : float, optional
            How long this may take, and then each :meth:`PreparedCall.infer`, in seconds; by default the client's own.
        library : str, optional
            Whose arrays inputs on GPUs that are to be filled are, and outputs there; as of :meth:`infer`.

        Returns
        -------
        PreparedCall
            With memory of its own until it is closed, and more of it once outputs of unknown size have found no room.
            Its arrays are not cleared. It raises the errors of :meth:`infer`, but for those of the server's answer.
        """
        core, timeout_s = self._open_core(), self._settings.timeout_of(timeout_s)
        settings = self._settings.of_call("prepare", model, path, timeout_s, options, library=library)

        def prepared() -> Steps[Any]:
            driver = self._driver  # of a client that is open, which it need not be when there is memory
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
        """Return the responses of a decoupled model as they come. Over gRPC, which alone has streams.

        On the direct path each response lies in one of ``frames`` places of a ring. The model waits, for some time,
        where its next place is still in use: until the result there is released and its arrays are gone. So keep fewer
        results than there are frames, or copies of them.

        A response that finds too little room comes back through Triton, and the client's next stream has room for it.

        Parameters
        ----------
        model, inputs, outputs, path, cuda_stream, library, **options
            As of :meth:`infer`, though tensors on GPUs go over the host. An output's room is that of one response.
        timeout_s : float, optional
            The longest wait for each response, in seconds; by default the client's own. The stream as a whole has
            no bound.
        frames : int, optional
            How many responses of a decoupled model may lie in shared memory at once, 1 to 64; by default 8, or 4
            where these take more than ``PoolOptions(stream_guess_bytes=...)``.

        Returns
        -------
        iterator of Result
            Nothing is sent before it is asked for the first. Each result's arrays are valid as long as they live. To
            stop early, ``close()`` the iterator, or drop it. It raises the errors of :meth:`infer`, but for arguments
            that cannot be sent, which this method refuses; and a CallerError if the client speaks HTTP. It is a
            DeadlineExceededError if no response came in time: the model may be waiting for results to be released.
        """
        core = self._open_core()
        settings = self._settings.of_call("stream", model, path, timeout_s, options, cuda_stream, library)
        timeout_s = self._settings.timeout_of(timeout_s)
        return self._responses(core, open_stream(core, settings, inputs, outputs, frames, timeout_s))

    def explain(self, model: str, *, model_version: str = "") -> ExplanationT:
        """Check anew which path calls of a model take, and why.

        Printed, the answer is a table: a line for each condition, with what to do. By default the server chooses the
        version. It is an InferenceError if the server has no such model.
        """
        deadline = time.monotonic() + self._settings.timeout_s
        return self._run(self._open_core().explain(model, model_version, deadline))

    def stats(self) -> ClientStats:
        """Return this client's counters: figures of this moment, which do not change afterwards."""
        return self._open_core().stats()

    def is_server_live(self, *, timeout_s: float | None = None) -> BoolT:
        """Return whether the server is up. If no server answers, it raises."""
        return self._ask(timeout_s, is_so, "server live")

    def is_server_ready(self, *, timeout_s: float | None = None) -> BoolT:
        """Return whether the server is up and has loaded its models."""
        return self._ask(timeout_s, is_so, "server ready")

    def is_model_ready(self, model: str, model_version: str = "", *, timeout_s: float | None = None) -> BoolT:
        """Return whether a model is loaded and its processes live; of an ensemble, whether its steps are ready.

        Triton before 26.01 calls a model ready whose process has died. So the processes of a Python model are looked
        at, where this one sees them; and a session is asked for a sign of life, which ``model.py`` does not see. A
        model whose ``call.forward`` finds no memory is not ready, either.

        Raises
        ------
        DeadlineExceededError
            The model was busy for longer than ``timeout_s``: the question waits for its turn.
        LivenessUnknownError
            A Python model gives no sign of life, on a server before 26.01 whose processes are not seen from here.
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
        """Return the server's figures of a model, or of all: ``{"model_stats": [...]}``."""
        return self._ask(timeout_s, ask, "model statistics", model, model_version)

    def load_model(
        self,
        model: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] = _NO_FILES,
        timeout_s: float | None = None,
    ) -> NoneT:
        """Have a model loaded, or loaded anew, by a server with ``--model-control-mode=explicit``.

        ``config`` is its configuration as JSON, instead of that in the repository; ``files``, which need it, are its
        files instead of those there: ``{"file:1/model.py": b"..."}``.
        """
        return self._ask(timeout_s, load, model, config, files)

    def unload_model(self, model: str, *, unload_dependents: bool = False, timeout_s: float | None = None) -> NoneT:
        """Have a model unloaded; of an ensemble also its steps, if ``unload_dependents``. Requests are ended first."""
        return self._ask(timeout_s, unload, model, unload_dependents)

    def __repr__(self) -> str:
        core = self._core
        state = "closed" if core is None else core.state
        needs_grpcio = core.codec.needs_grpcio if core is not None and state == "open" else None
        wire = "" if needs_grpcio is None else f" wire={'grpcio' if needs_grpcio else 'sockets'}"
        return f"<{type(self).__name__} {vars(self).get('_settings', 'of no server')}{wire} {state}>"

    @abstractmethod
    def _begin(self) -> None:
        """Begin to be connected, once this has been made."""

    @abstractmethod
    def _responses(self, core: Core, opening: Steps[OpenStream]) -> StreamT:
        """Return the responses of a stream that is to be opened, as they come."""

    def _ask(self, timeout_s: float | None, call: Any, *named: Any) -> Any:
        core, deadline = self._open_core(), time.monotonic() + self._settings.timeout_of(timeout_s)
        return self._run(call(core.codec, deadline, *named))

    def _open_core(self) -> Core:
        if self._core is None:
            raise ClosedError("this client")
        if self._core.is_forked:
            raise ForkedError("this client")
        return self._core
