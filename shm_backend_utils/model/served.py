"""One request from its beginning to its end: what is claimed, committed and given back, whatever the model does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ..errors import BatchSizeError, ClosedError, ModelError, ShmError
from ..memory.cuda.events import Event
from ..model_spec import BATCH_CARRIER
from ..tensors.strings_view import StringsView
from ..tensors.view import TensorView
from .completion import Completion
from .device_view import DeviceView
from .direct import DirectPlan, DirectTensors
from .forwarding import Forwarding
from .incoming import TRITON, Incoming
from .instance import Instance
from .outputs import Outputs
from .places import DIRECT, Output
from .plans import DirectRequest, OrdinaryRequest

__all__ = ["Served"]

Self = TypeVar("Self", bound="Served")


class Served:
    """One request that is being served. A context manager: leaving it commits the outputs, or fails the request.

    Attributes
    ----------
    response : InferenceResponse
        What ``execute`` returns for this request; there once the call was committed.
    """

    __slots__ = (
        "_arrays",
        "_backend",
        "_completion",
        "_direct",
        "_forwarder",
        "_generation",
        "_incoming",
        "_is_on_devices",
        "_is_open",
        "_meaning",
        "_outputs",
        "_pending",
        "_plans",
        "_results",
        "_spec",
        "_used_devices",
        "response",
    )

    def __init__(self, instance: Instance, request: Any, completion: Completion | None = None) -> None:
        self.response: Any = None
        self._spec, self._backend, self._plans, self._arrays, self._forwarder = instance
        self._used_devices: set[int] = set()
        self._completion = completion
        self._incoming = Incoming(request, self._spec, self._backend, self._arrays)
        self._meaning: OrdinaryRequest | DirectRequest | None = None
        self._outputs: Outputs | None = None
        self._is_on_devices = False
        self._direct: DirectTensors | None = None
        self._results = b""
        self._generation = 0
        self._pending: set[Forwarding] = set()
        self._is_open = False

    @property
    def devices(self) -> set[int]:
        """The GPUs that this call uses. It is not over before they have done what is on their current streams."""
        return self._used_devices if self._outputs is None else self._used_devices | self._outputs.devices

    @property
    def path(self) -> str:
        """``"direct"`` if the request has a descriptor for this model, else ``"triton"``.

        Triton's own shared memory and plain requests look the same from inside a Python model.
        """
        return DIRECT if isinstance(self._meaning, DirectRequest) else TRITON

    @property
    def direct_plan(self) -> DirectPlan | None:
        """What its descriptor means; None if it has none."""
        return None if self._direct is None else self._direct.plan

    @property
    def batch_size(self) -> int:
        """How many rows its inputs have. For models with a batch dimension."""
        if self._direct is not None and self._direct.plan.inputs:
            return next(iter(self._direct.plan.inputs.values())).shape[0]
        return int(next(iter(self._incoming.tensors.values())).shape()[0])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Names, data types and shapes of its inputs, but for their rows: equal for requests that make one batch."""
        kind = () if self._direct is None else self._direct.plan.kind
        if len(kind) == len(self._spec.inputs):
            return kind
        views = [self._find_input(name) for name in self._spec.inputs]
        return tuple([(view.name, view.triton_dtype, view.shape[1:]) for view in views if view is not None])

    def __enter__(self: Self) -> Self:
        self._meaning, generation = self._plans.begin(self._incoming.text)
        self._generation = generation
        if isinstance(self._meaning, DirectRequest):
            plan = self._meaning.direct
            try:
                self._check_batch_size(plan)
                self._direct = DirectTensors(plan, generation)
                self._used_devices.update(plan.devices)
            except BaseException:
                self._plans.end(plan)
                raise
        self._outputs = self._first_outputs()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail()
            return
        try:
            self._check_nothing_is_pending()
            self._respond()
            if self.devices and self._completion is None:
                self._arrays.synchronize(sorted(self.devices))
        except BaseException:
            self._fail()
            raise
        self._is_open = False
        if self.devices and self._completion is not None:
            self._completion.add(self)
        else:
            self.end()

    @property
    def can_end_by_event(self) -> bool:
        """Whether all that the client looks at is on GPUs, so that it can wait for an event itself."""
        if self._direct is None or not self._direct.plan.slots or not self._direct.has_room_for_events(self._results):
            return False
        return self._is_on_devices

    def end(self, events: Sequence[Event] = ()) -> None:
        """Write the results. From here on the memory may be the client's, when it has waited for the events."""
        self._is_open = False
        if self._direct is not None:
            self._direct.complete(self._results, events)
            self._plans.end(self._direct.plan)

    def end_by(self, error: Exception) -> None:
        """Fail the call, for a reason that is not one of its own block's."""
        self.response = self._backend.error_response(error)
        self._fail()

    def _first_outputs(self) -> Outputs | None:
        return Outputs(self._spec, self._arrays, None if self._direct is None else self._direct.plan.places)

    def _respond(self) -> None:
        outputs = self._open_outputs().finish(self._incoming.requested)
        tensors = self._tensors(outputs)
        response = self._backend.response(tensors)
        if self._direct is not None:
            self._results = self._direct.plan.places.results(outputs)
            self._is_on_devices = all(isinstance(output.view, DeviceView) for output in outputs) and not tensors
        self.response = response

    def _tensors(self, outputs: Iterable[Output]) -> list[Any]:
        """Return those outputs as tensors that go back through Triton."""
        return [self._tensor(output.view) for output in outputs if not output.is_delivered]

    def _tensor(self, view: TensorView) -> Any:
        if isinstance(view, StringsView) and self._direct is not None:
            return self._backend.output(view.name, view.strings().encoded)  # their shape is in the results
        if not isinstance(view, DeviceView):
            return self._backend.output(view.name, view.numpy())
        if self._direct is not None:  # it found no room, and travels with the response
            return self._backend.output(view.name, self._arrays.to_host(view))
        return self._backend.device_output(view.name, view.__dlpack__(stream=-1))

    def _check_nothing_is_pending(self) -> None:
        if self._pending:
            raise ModelError(
                f"model.py has left the call while {len(self._pending)} calls of forward_async were under way, or were "
                "cancelled; await them before"
            )

    def _fail(self) -> None:
        self._is_open = False
        if self._pending:
            self._abandon()
        elif self._direct is not None:
            try:
                self._wait_quietly()  # the memory is the client's after this, and the device may be writing there
                self._direct.fail()
            finally:
                self._plans.end(self._direct.plan)

    def _abandon(self) -> None:
        """End the call while another model may be at work on its memory: the client finds out when that is over."""
        for forwarding in self._pending:
            forwarding.give_up()  # first: what begins from now on must not use the memory
        if self._direct is not None:
            self._direct.abandon()
            self._plans.end(self._direct.plan)

    def _wait_quietly(self) -> None:
        if self.devices:
            with contextlib.suppress(ShmError):
                self._arrays.synchronize(sorted(self.devices))

    def _find_input(self, name: str) -> TensorView | None:
        self._check_open()
        if self._direct is not None:
            view = self._direct.plan.inputs.get(name)
            if view is not None:
                return view
        view = self._incoming.view(name)
        if isinstance(view, DeviceView):
            self._used_devices.add(view.device)
        return view

    def _check_batch_size(self, direct: DirectPlan) -> None:
        """Raise unless the descriptor's inputs have as many rows as Triton's batcher was told."""
        if self._spec.max_batch_size == 0:
            return
        batch_size = self._incoming.carried_batch_size
        for name, view in direct.inputs.items():
            if view.shape[0] != batch_size:
                raise BatchSizeError(
                    name,
                    f"tensor {name!r} has a batch of {view.shape[0]}, but the request has {_batch(batch_size)}; "
                    f"send input {BATCH_CARRIER!r} with shape [{view.shape[0]}, 0]",
                )

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("this call")

    def _open_outputs(self) -> Outputs:
        if self._outputs is None or not self._is_open:
            raise ClosedError("this call")
        return self._outputs


def _batch(batch_size: int | None) -> str:
    return "none" if batch_size is None else f"one of {batch_size}"
