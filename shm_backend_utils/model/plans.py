"""What a request's parameters mean, worked out once for each text and kept.

A client that repeats a call sends the same parameters but for the generation. Taking that number out of the text leaves
a key; what it led to the last time holds as long as the regions do. This is what makes a request cost microseconds.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any, Final

from .. import descriptor
from ..descriptor import GENERATION_PARAMETER, PARAMETER
from ..errors import DescriptorError, RegionGoneError
from ..spec import PATHS_PARAMETER, ModelSpec
from .direct import PATH as DIRECT
from .direct import DirectPlan
from .mappings import Mappings

__all__ = ["Plan", "Plans"]

_MOST_REMEMBERED: Final = 1024
# Quotes inside JSON strings are escaped, so this can only be the name of a member of the outermost object.
_MARK: Final = f'"{GENERATION_PARAMETER}":'


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's parameters mean.

    Attributes
    ----------
    parameters : dict
        The user's own parameters.
    direct : DirectPlan or None
        None if the request names no memory for this model.
    notice : str
        What to add to the complaint about a missing input.
    """

    parameters: dict[str, Any]
    direct: DirectPlan | None
    notice: str = ""


class Plans:
    """The plans of one session. Thread-safe."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._mappings = Mappings()
        self._plans: dict[tuple[str, str], Plan] = {}

    def get(self, text: str) -> tuple[Plan, int]:
        """Return the plan for a request's parameters, and the generation; 0 if the plan is not direct.

        Parameters
        ----------
        text : str
            The parameters as Triton delivers them: a JSON object.

        Raises
        ------
        DescriptorError, TensorError, RegionRefusedError, RegionGoneError
            The parameters name memory that this model cannot use.
        """
        before, generation, after = _without_generation(text)
        key = (before, after)
        plan = self._plans.get(key)
        if plan is not None and plan.direct is not None:
            try:
                plan.direct.check()
            except RegionGoneError:
                pass  # the name may stand for another region by now
            else:
                return plan, int(generation)
        return self._make(key, text)

    def close(self) -> None:
        """Forget every plan and unmap every region."""
        with self._lock:
            self._plans.clear()
            self._mappings.close()

    def _make(self, key: tuple[str, str], text: str) -> tuple[Plan, int]:
        parameters: dict[str, Any] = json.loads(text) if text else {}
        descriptor_text = parameters.pop(PARAMETER, None)
        generation = parameters.pop(GENERATION_PARAMETER, None)
        if descriptor_text is None:
            self._check_ordinary_is_served()
            return Plan(parameters, None), 0
        if type(descriptor_text) is not str:
            raise DescriptorError("", f"a value of type {type(descriptor_text).__name__}", "a string")
        claim = descriptor.parse(descriptor_text)
        if claim.model != self._spec.name:
            return Plan(parameters, None, "; its shm_io descriptor speaks to another model, see its field `model`"), 0
        if self._spec.paths is not None and DIRECT not in self._spec.paths:
            raise DescriptorError("", "a descriptor", f"none: model {self._spec.name!r} does not serve the direct path")
        generation = descriptor.check_generation(generation)
        with self._lock:
            self._forget_unlinked()
            plan = Plan(parameters, DirectPlan(claim, self._spec, self._mappings))
            self._plans[key] = plan
        return plan, generation

    def _forget_unlinked(self) -> None:
        self._mappings.forget_unlinked()
        current = {key: plan for key, plan in self._plans.items() if plan.direct is not None and plan.direct.is_current}
        self._plans = current if len(current) < _MOST_REMEMBERED else {}

    def _check_ordinary_is_served(self) -> None:
        if self._spec.paths == frozenset({DIRECT}):
            allowed = f"{PATHS_PARAMETER} of model {self._spec.name!r} allows only the direct path"
            raise DescriptorError("", "nothing", f"a descriptor: {allowed}")


def _without_generation(text: str) -> tuple[str, str, str]:
    """Split a JSON object's text around the digits of the generation; they are empty if there are none."""
    before, _, rest = text.partition(_MARK)
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return before, digits, rest[len(digits) :]
