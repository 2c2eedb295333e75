"""ModelHarness: a model's folder, loaded and run without a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy.typing as npt

from ...client.errors import DeadlineExceededError, ForkedError, InferenceError
from ...client.transports.transport import AsyncTransport, Transport
from ...errors import CallerError, ClosedError, translate
from ...process import Origin, Unclosed, call_after_fork, never_destroy
from ..emulator import MetricsRegistry
from ..emulator.host import Faults
from .checks import warn_of_outputs
from .child import ChildInstance
from .requests import Outcome, Request, ServerError, of_arrays
from .server import EmulatedServer, InstanceKind
from .stub import Stub
from .transport import AsyncHarnessTransport, HarnessTransport

__all__ = ["ModelHarness"]

_PATIENCE_S: Final = 60.0
_NO_FAULTS: Final = Faults()


class ModelHarness:
    """Models, loaded from their folders and run as a server runs them. A context manager. Thread-safe.

    ::

        with ModelHarness("model_repository/multiply") as harness:
            images = np.ones((2, 3, 224, 224), np.float32)
            assert (harness.infer({"INPUT0": images})["OUTPUT0"] == 2).all()

    The models are initialized when you make it, and finalized when you close it. ``ShmClient(harness)`` and
    ``AsyncShmClient(harness)`` connect clients to it.

    Parameters
    ----------
    *folders : str or path
        The models' folders. By default, :meth:`infer`, :meth:`stream` and :meth:`execute` call the first model; the
        others are models that it calls.
    faults : Faults, optional
        Faults of real stubs that its stubs have, too.
    patience_s : float, optional
        How long to wait for a model's answer, in seconds.

    Raises
    ------
    ModelError
        A model does not load; the message quotes the server and says what to do.
    """

    _server: EmulatedServer | None = None
    _is_forked = False

    def __init__(
        self, *folders: str | PathLike[str], faults: Faults = _NO_FAULTS, patience_s: float = _PATIENCE_S
    ) -> None:
        self._begin(folders, Stub, faults, patience_s)

    @classmethod
    def in_child(
        cls, *folders: str | PathLike[str], faults: Faults = _NO_FAULTS, patience_s: float = _PATIENCE_S
    ) -> ModelHarness:
        """Make a harness with each instance of a model in a process of its own, as on a server.

        Client and model then really share memory. A model whose process dies stays dead; its requests fail.

        Parameters
        ----------
        *folders, faults, patience_s
            As for the class.
        """
        made = cls.__new__(cls)
        made._begin(folders, ChildInstance, faults, patience_s)
        return made

    def _begin(
        self, folders: Sequence[str | PathLike[str]], kind: InstanceKind, faults: Faults, patience_s: float
    ) -> None:
        if not folders:
            raise CallerError(
                "ModelHarness needs a model's folder, for example ModelHarness('model_repository/multiply')"
            )
        paths = [Path(folder).absolute() for folder in folders]
        self._patience_s = patience_s
        self._name = paths[0].name
        self._server = EmulatedServer(paths, kind, faults)
        call_after_fork(self)
        self._unclosed = Unclosed(Origin.here("the ModelHarness made"), "call close(), or use it in a with statement")

    def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, str | int | bool | float] | None = None,
        model: str = "",
        request_id: str = "",
        sequence_id: int | str = 0,
        flags: int = 0,
        timeout_us: int = 0,
    ) -> dict[str, npt.NDArray[Any]]:
        """Let a model execute one request, as the server would: check it, batch it with waiting ones, execute it.

        Parameters
        ----------
        inputs : mapping of str to array
            With the batch dimension, if the model has one, and in its dtypes; strings are str or bytes.
        outputs : sequence of str, optional
            The names of the wanted ones; all, if not given.
        parameters : mapping, optional
            The request's parameters.
        model : str, optional
            Its name; by default the first model.
        request_id, sequence_id, flags, timeout_us : optional
            Handed to the model in the request; flags are 1 for the first request of a sequence, and 2 for the last.

        Returns
        -------
        dict of str to numpy.ndarray
            The model's outputs; strings are arrays of bytes objects.

        Raises
        ------
        InferenceError
            The server would refuse the request, or the model answered with an error; ``status()`` has Triton's code.
        DeadlineExceededError
            The model has not answered in ``patience_s``.
        """
        server = self._open()
        request = Request(inputs, outputs, parameters or {}, request_id, sequence_id, flags, timeout_us, model=model)
        with self._translated:
            target, pending = server.begin(of_arrays(request))
            if target.is_decoupled:
                raise CallerError(
                    f"model {target.name!r} is decoupled, and may answer any number of times; use stream()"
                )
            try:
                target.run(pending)
                outcome = pending.answer.only(self._patience_s)
            finally:
                pending.answer.cancel()
            warn_of_outputs(target.config, pending.delivery, outcome, stacklevel=3)
            return _arrays(outcome)

    def stream(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, str | int | bool | float] | None = None,
        model: str = "",
        request_id: str = "",
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the responses of a model, decoupled or not, as they come; parameters and errors as of :meth:`infer`."""
        server = self._open()
        request = Request(inputs, outputs, parameters or {}, request_id, model=model)
        with self._translated:
            answer = server.execute_aside(of_arrays(request))
            try:
                for outcome in answer.outcomes(self._patience_s):
                    if not outcome.is_empty:
                        yield _arrays(outcome)
            finally:
                answer.cancel()

    def execute(
        self, requests: Sequence[Mapping[str, Any] | Request]
    ) -> list[dict[str, npt.NDArray[Any]] | InferenceError]:
        """Call the model's ``execute`` once, with these requests as one batch.

        Parameters
        ----------
        requests : sequence of Request, or of mappings of str to array
            All for the same model. A mapping stands for a request with these inputs and nothing else.

        Returns
        -------
        list
            For each request its outputs, or its error; for a decoupled model those of the last response.

        Raises
        ------
        CallerError
            The server would never give these requests to one ``execute``.
        InferenceError
            The server would refuse one of them.
        """
        server = self._open()
        if isinstance(requests, Mapping):
            raise CallerError("execute() got one mapping; expected a sequence of requests: execute([inputs])")
        pending, names = [], []
        with self._translated:
            for each in requests:
                model, one = server.begin(of_arrays(each if isinstance(each, Request) else Request(each)))
                pending.append(one)
                names.append(model.name)
        if not pending:
            raise CallerError("execute() got no request; the server calls a model with one at least")
        other = next((name for name in names if name != names[0]), None)
        if other is not None:
            raise CallerError(
                f"execute() got requests for models {names[0]!r} and {other!r}; expected one model's: call it for each"
            )
        model.batcher.run_together(pending)
        answers: list[dict[str, npt.NDArray[Any]] | InferenceError] = []
        for one in pending:
            try:
                outcome = one.answer.only(self._patience_s)
                warn_of_outputs(model.config, one.delivery, outcome, stacklevel=3)
                answers.append(_arrays(outcome))
            except (ServerError, TimeoutError) as error:
                answers.append(self._error(error))
            finally:
                one.answer.cancel()
        return answers

    @property
    def log(self) -> list[tuple[str, str]]:
        """The models' log: level (``"WARNING"``) and message; also in Python's log."""
        return list(self._open().log_lines)

    @property
    def metrics(self) -> MetricsRegistry:
        """The metric families that models in this process have made."""
        return self._open().metrics

    def connect(self) -> Transport:
        """Return a transport for a client; ``ShmClient(harness)`` calls this."""
        return HarnessTransport(self._open())

    def connect_async(self) -> AsyncTransport:
        """Return a transport for a client; ``AsyncShmClient(harness)`` calls this."""
        return AsyncHarnessTransport(self._open())

    def close(self) -> None:
        """Finalize the models. You can call it again.

        Raises
        ------
        ModelError
            A model's ``finalize`` raised.
        """
        server, self._server = self._server, None
        if server is not None:
            self._unclosed.close()
            server.close()

    def after_fork(self) -> None:
        """In a forked child, leave the models alone: they are the parent's."""
        if self._server is not None:
            never_destroy(self._server)
            self._server = None
            self._is_forked = True

    def __repr__(self) -> str:
        state = "closed" if self._server is None else "open"
        return f"<{type(self).__name__} {vars(self).get('_name', '')!r} {state}>"

    def __enter__(self) -> ModelHarness:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> EmulatedServer:
        if self._is_forked:
            raise ForkedError("this ModelHarness")
        if self._server is None:
            raise ClosedError("this ModelHarness")
        return self._server

    @property
    def _translated(self) -> translate[ServerError | TimeoutError]:
        return translate((ServerError, TimeoutError), self._error)

    def _error(self, error: ServerError | TimeoutError) -> InferenceError:
        if isinstance(error, ServerError):
            return InferenceError(error.message, error.code)
        text = f"model {self._name!r} has not answered in {self._patience_s:g} s"
        return DeadlineExceededError(text, "DEADLINE_EXCEEDED")


def _arrays(outcome: Outcome) -> dict[str, npt.NDArray[Any]]:
    if outcome.error is not None:
        raise ServerError(*outcome.error)
    return {tensor.name: tensor.array for tensor in outcome.outputs if tensor.array is not None}
