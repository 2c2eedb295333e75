"""What a client has learned of a model: its configuration, how large its outputs get, and which calls were planned."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Final

from ..errors import TensorError
from ..model_spec import ModelSpec
from .explanation import Explanation
from .plan import CallPlan, Signature, many_of, plan
from .transport import Transport

__all__ = ["Catalog", "KnownModel"]

_LOG: Final = logging.getLogger(__name__)

_MOST_PLANS: Final = 256
_SECOND_LOOK_S: Final = 30.0
_ANY_BATCH_SIZE: Final = 2**31


class KnownModel:
    """One model in one version, as the server described it.

    Attributes
    ----------
    spec : ModelSpec
    refusals : dict of str to str
        Paths that turned out to be closed, with what was said.
    explanation : Explanation or None
        Which path its calls take, and why; None until somebody has found out.
    path : str or None
        That path.
    seen : float
        When the server was asked last, by ``time.monotonic()``.
    """

    def __init__(self, spec: ModelSpec, head_room: float) -> None:
        self.spec = spec
        self.refusals: dict[str, str] = {}
        self.explanation: Explanation | None = None
        self.path: str | None = None
        self.seen = time.monotonic()
        self._head_room = head_room
        self._learned: dict[str, int] = {}
        self._plans: dict[Signature, CallPlan] = {}
        self._plans_of_many: dict[tuple[CallPlan, int], CallPlan] = {}

    def plan(self, call: Signature) -> CallPlan:
        """Return the plan of a call that is one request.

        Raises
        ------
        TensorError
            The model does not take these tensors.
        """
        known = self._plans.get(call)
        if known is None:
            if len(self._plans) >= _MOST_PLANS:
                self._forget_plans()
            known = self._plans[call] = plan(self.spec, call, self._learned, most_rows=self.spec.max_batch_size)
        return known

    def refuses(self, call: Signature, path: str) -> bool:
        """Return whether the model certainly does not run for such a call on such a path."""
        if self.spec.paths is not None and path not in self.spec.paths:
            return True
        try:
            self.plan(call)
        except TensorError:
            return True
        return False

    @property
    def is_worth_another_look(self) -> bool:
        """Whether its calls might take a better path, had its configuration changed meanwhile."""
        return self.path not in (None, "direct") and time.monotonic() - self.seen > _SECOND_LOOK_S

    def plan_of_any_size(self, call: Signature) -> CallPlan:
        """Return the plan of a call that will be several requests, whatever its batch size; raises as :meth:`plan`."""
        return plan(self.spec, call, self._learned, most_rows=_ANY_BATCH_SIZE)

    def plan_of_many(self, one: CallPlan, count: int) -> CallPlan:
        """Return the plan of so many calls like one, whose rows follow one another."""
        known = self._plans_of_many.get((one, count))
        if known is None:
            known = self._plans_of_many[one, count] = self.plan_of_any_size(many_of(one.signature, count))
        return known

    def learn(self, byte_sizes: Mapping[str, int], rows: int) -> None:
        """Take note of how large outputs were that found too little room, in a call of so many rows."""
        for name, byte_size in byte_sizes.items():
            per_row = math.ceil(byte_size / rows * self._head_room)
            self._learned[name] = max(per_row, self._learned.get(name, 0))
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans = {}
        self._plans_of_many = {}


class Catalog:
    """The models that a client has called."""

    def __init__(self, transport: Transport, head_room: float) -> None:
        self._transport = transport
        self._head_room = head_room
        self._known: dict[tuple[str, str], KnownModel] = {}

    def recall(self, model: str, version: str) -> KnownModel | None:
        """Return a model that was looked up before, unless it is time to look again."""
        known = self._known.get((model, version))
        return None if known is None or known.is_worth_another_look else known

    async def look_up(self, model: str, version: str, timeout_s: float) -> KnownModel:
        """Ask the server for a model, and return it; the same object as before if nothing has changed.

        Raises
        ------
        InferenceError
            The server has no such model.
        """
        spec = ModelSpec.from_config(await self._transport.model_config(model, version, timeout_s))
        known = self._known.get((model, version))
        if known is None or known.spec != spec:
            if known is not None:
                _LOG.info("model %r has another configuration now", model)
            known = self._known[model, version] = KnownModel(spec, self._head_room)
        known.seen = time.monotonic()
        return known

    @property
    def reasons(self) -> dict[str, str]:
        """For each model: which path its calls take, and why not a better one."""
        found = [(known.spec.name, known.explanation) for known in self._known.values()]
        return {name: f"{why.path}: {why.reason}" for name, why in found if why is not None}

    def forget(self) -> None:
        """Forget all models: the server may have others by now."""
        self._known.clear()
