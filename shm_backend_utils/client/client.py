"""ShmClient: inference whose tensors stay in shared memory."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncGenerator, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ..errors import ClosedError
from ..memory.cuda.memory import CudaAccess
from .call import PreparedCall
from .connect import connect
from .demand import Outputs
from .engine import Engine, OpenCall
from .errors import ForkedError
from .explanation import Explanation
from .options import RequestOptions, Tls
from .paths import PathName
from .plan import InputDescription
from .pool_options import PoolOptions
from .result import Result
from .runtime import BlockingRuntime, run
from .split import infer_split
from .stats import ClientStats
from .terms import Terms

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShmClient"]

_MOST_SUBMITTED_AT_ONCE: Final = 32


class ShmClient:
    """A client of one server. A context manager. May be used from several threads at once.

    Making one removes what this user's clients have left in shared memory when they were killed.

    Parameters
    ----------
    url : str
        ``HOST:PORT`` or ``grpc://HOST:PORT`` for gRPC, ``http://HOST:PORT`` for HTTP; ``grpcs://`` or
        ``https://`` by TLS.
    timeout_s : float
        How long a call may take, waiting for memory included, where it does not say otherwise.
    path : str
        ``"auto"``: ``"direct"`` where the model declares it and the memory can be shared, else ``"triton-shm"``, else
        ``"inline"``. One of these by name: that, or an error.
    pool : PoolOptions, optional
        How much shared memory to use.
    tls : Tls, optional
        Certificates.
    cuda : CudaAccess, optional
        For tensors on GPUs; by default CuPy's, loaded when a call has one first.

    Raises
    ------
    ServerUnavailableError
        No server answers there.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        path: PathName = "auto",
        pool: PoolOptions | None = None,
        tls: Tls | None = None,
        cuda: CudaAccess | None = None,
    ) -> None:
        self._terms = Terms(url, timeout_s, path, pool, tls, cuda)
        self._terms.memory.end_with(self)
        self._submitted = concurrent.futures.ThreadPoolExecutor(_MOST_SUBMITTED_AT_ONCE, "shm submit")
        self._engine: Engine | None = Engine(connect(url, tls), BlockingRuntime(), self._terms.memory)
        try:
            run(self._engine.check_server_answers(self._terms.timeout_s))
        except BaseException:
            self.close()
            raise

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        split: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """Run a model. On the direct path its inputs are copied once, into shared memory, and its outputs not at all.

        Parameters
        ----------
        model : str
            Its name.
        inputs : mapping
            Name to a NumPy array in any memory order; to anything with ``__dlpack__``, ``__array_interface__`` or
            ``__array__``, on the host; to a list of these, which become the rows (or, with as many dimensions as the
            input, the parts) of one batch; or to Python numbers and strings. Dtypes of arrays must be the model's.
        outputs : sequence of str or mapping, optional
            The outputs wanted, all if not given. A mapping also says how much room each needs, as bytes, as
            ``(shape, dtype)``, or as None. Where neither this nor the configuration tells, the size is learned from the
            first call, whose output comes back through Triton.
        timeout_s : float, optional
            How long the call may take.
        path : str, optional
            As for the client.
        split : bool
            Whether a batch may be larger than the model takes at once: it is sent as several requests, side by side.
        **options
            See :class:`RequestOptions`.

        Raises
        ------
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
        engine = self._open_engine()
        demand = self._terms.demand("infer", model, path, timeout_s, options)
        if not split:
            return run(engine.infer(demand, inputs, outputs))
        with engine.tally.failures():
            return run(infer_split(engine, demand, inputs, outputs))

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        **options: Unpack[RequestOptions],
    ) -> concurrent.futures.Future[Result]:
        """As :meth:`infer`, without waiting for the answer. The inputs have been copied when this returns.

        It waits for memory: who submits faster than the model answers is slowed down to its pace.
        """
        engine = self._open_engine()
        demand = self._terms.demand("submit", model, path, timeout_s, options)
        with engine.tally.failures():
            call = run(engine.begin(demand, inputs, outputs))
        future = self._submitted.submit(_finish, engine, call)
        future.add_done_callback(lambda future: call.exchange.close())  # it may have been cancelled
        return future

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, InputDescription],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        **options: Unpack[RequestOptions],
    ) -> PreparedCall:
        """Return a call whose inputs are to be filled in place: no copy at all on the direct path.

        ``inputs`` maps names to ``(shape, dtype)``; ``timeout_s`` is for this and for each :meth:`PreparedCall.infer`;
        the rest is as for :meth:`infer`.
        """
        engine = self._open_engine()
        demand = self._terms.demand("prepare", model, path, timeout_s, options)
        prepared = run(engine.prepare(demand, inputs, outputs))
        return PreparedCall(engine, prepared, self._terms.patience_s(timeout_s))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Outputs = None,
        timeout_s: float | None = None,
        path: PathName | None = None,
        frames: int = 4,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Result]:
        """Return the responses of a decoupled model as they come. Over gRPC, which alone has streams.

        On the direct path each response lies in one of ``frames`` places of a ring. The model waits, for some time,
        where its next place is still in use: until the result there is released and its arrays are gone. So keep fewer
        results than there are frames, or copies of them.

        ``timeout_s`` is the longest wait for the next response. Who stops early ends the stream by ``close()`` of what
        this returns, or by letting go of it.
        """
        engine = self._open_engine()
        demand = self._terms.demand("stream", model, path, timeout_s, options)
        return _iterated(engine.stream(demand, inputs, outputs, frames, self._terms.patience_s(timeout_s)))

    def explain(self, model: str, *, model_version: str = "") -> Explanation:
        """Check anew which path calls of a model take, and why. Printed, it is a table."""
        return run(self._open_engine().explain(model, model_version, self._terms.timeout_s))

    def stats(self) -> ClientStats:
        """Return what this client has done so far."""
        return self._open_engine().stats()

    def close(self) -> None:
        """Close the connection and remove the shared memory. Arrays of results stay valid. Twice is fine."""
        self._submitted.shutdown(wait=False, cancel_futures=True)
        engine, self._engine = self._engine, None
        if engine is not None and not self._terms.memory.pool.is_a_forks:
            run(engine.close())
        self._terms.memory.end()

    def __enter__(self) -> ShmClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise ClosedError("this client")
        if self._terms.memory.pool.is_a_forks:
            raise ForkedError("this client")
        return self._engine


def _finish(engine: Engine, call: OpenCall) -> Result:
    with engine.tally.failures():
        return run(engine.finish(call))


def _iterated(results: AsyncGenerator[Result, None]) -> Iterator[Result]:
    try:
        while True:
            try:
                yield run(results.__anext__())
            except StopAsyncIteration:
                return
    finally:
        run(results.aclose())
