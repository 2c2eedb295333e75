"""What a request's parameters mean, worked out once for each text and kept.

A client that repeats a call sends the same parameters but for the generation. Taking that number out of the text leaves
a key; what it led to the last time holds as long as the regions do. This is what makes a request cost microseconds.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from typing import Any, Final

from ..errors import DescriptorError, MachineError, RegionGoneError
from ..memory.cuda.memory import CudaAccess
from ..memory.repeater import Repeater
from ..model_spec import PATHS_PARAMETER, ModelSpec
from ..protocol import descriptor
from ..protocol.descriptor import GENERATION_PARAMETER, PARAMETER, Descriptor
from .direct import DirectPlan
from .manager import SharedMemoryManager
from .pinning import Pinning
from .places import DIRECT
from .regions import ResolvedRegion, Resolver
from .settings import Settings

__all__ = ["DirectRequest", "OrdinaryRequest", "Plans"]

_MOST_REMEMBERED: Final = 1024
_SWEEP_INTERVAL_S: Final = 5.0
# Quotes inside JSON strings are escaped, so this can only be the name of a member of the outermost object.
_MARK: Final = f'"{GENERATION_PARAMETER}":'


@dataclass(frozen=True, slots=True)
class OrdinaryRequest:
    """Parameters that name no memory for this model.

    Attributes
    ----------
    parameters : dict
        The user's own.
    notice : str
        What to add to the complaint about a missing input.
    """

    parameters: dict[str, Any]
    notice: str = ""


@dataclass(frozen=True, slots=True)
class DirectRequest:
    """Parameters that name memory; ``parameters`` are the user's own."""

    parameters: dict[str, Any]
    direct: DirectPlan


class Plans:
    """The plans of one session. Thread-safe.

    The server tells a request's parameters in any order, so one plan may be found under several texts.

    A thread looks after the mappings from time to time, so that a model that gets no requests does not hold memory that
    its owners have given up.
    """

    def __init__(self, spec: ModelSpec, settings: Settings, cuda: CudaAccess, pinning: Pinning | None) -> None:
        self._manager = SharedMemoryManager(settings.max_mapped_bytes, cuda)
        self._spec = spec
        self._resolver = Resolver(settings, self._manager, cuda, pinning)
        self._lock = threading.Lock()
        self._plans: dict[tuple[str, str], DirectRequest] = {}
        self._sweeper: Repeater | None = None

    def begin(self, text: str) -> tuple[OrdinaryRequest | DirectRequest, int]:
        """Return what a request's parameters mean, and its generation; 0 if it has none.

        The regions of a direct request stay mapped until :meth:`end`.

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
        known = self._plans.get(key)
        if known is not None:
            try:
                self._use(known.direct)
            except RegionGoneError:
                pass  # the name may stand for another region by now
            else:
                return known, int(generation or 0)
        return self._make(key, text, known)

    def end(self, plan: DirectPlan) -> None:
        """End what :meth:`begin` began."""
        self._manager.end_use(plan.mapped)

    def mapped(self) -> tuple[int, int]:
        """Return how many bytes are mapped, and how many regions."""
        return self._manager.mapped_bytes, self._manager.mapped_regions

    def sweep(self) -> None:
        """Unmap what owners have given up, and forget what used it.

        Raises
        ------
        MachineError
            The server, which knows the names of foreign regions, does not answer.
        """
        with self._lock:
            self._manager.drop_abandoned()
            self._resolver.forget_unfenced()
            self._forget_unmapped()
        changed = self._resolver.find_changed_registrations()  # not locked: requests need not wait for the answer
        with self._lock:
            self._resolver.forget_registrations(changed)
            self._forget_unmapped()

    def close(self) -> None:
        """Forget every plan and unmap every region."""
        if self._sweeper is not None:
            self._sweeper.stop()
        with self._lock:
            self._plans.clear()
            self._manager.unregister_all()

    def _make(
        self, key: tuple[str, str], text: str, broken: DirectRequest | None
    ) -> tuple[OrdinaryRequest | DirectRequest, int]:
        parameters: dict[str, Any] = json.loads(text) if text else {}
        descriptor_text = parameters.pop(PARAMETER, None)
        generation = parameters.pop(GENERATION_PARAMETER, None)
        if descriptor_text is None:
            self._check_ordinary_is_served()
            return OrdinaryRequest(parameters), 0
        if type(descriptor_text) is not str:
            raise DescriptorError("", f"a value of type {type(descriptor_text).__name__}", "a string")
        claim = descriptor.parse(descriptor_text)
        if claim.model != self._spec.name:
            notice = "; its shm_io descriptor speaks to another model, see its field `model`"
            return OrdinaryRequest(parameters, notice), 0
        if self._spec.paths is not None and DIRECT not in self._spec.paths:
            raise DescriptorError("", "a descriptor", f"none: model {self._spec.name!r} does not serve the direct path")
        same = (descriptor_text, json.dumps(parameters, sort_keys=True))
        with self._lock, contextlib.ExitStack() as held:
            self._manager.drop_abandoned()
            made = self._plans.get(same)
            if made is None or made is broken or not made.direct.is_current:
                made = DirectRequest(parameters, self._make_plan(claim, held))
            if made.direct.slots:
                generation = descriptor.check_generation(generation)
            self._forget_unmapped()
            self._plans[key] = self._plans[same] = made
            self._start_sweeper()
            self._use(made.direct)
        return made, generation or 0

    def _make_plan(self, claim: Descriptor, held: contextlib.ExitStack) -> DirectPlan:
        regions: list[ResolvedRegion] = []
        for index, region in enumerate(claim.regions):
            resolved = self._resolver.resolve(region, f"shm_io.regions[{index}]", regions)
            self._manager.begin_use([resolved.mapped])  # or the next one might take its place
            held.callback(self._manager.end_use, [resolved.mapped])
            regions.append(resolved)
        return DirectPlan(claim, self._spec, regions)

    def _use(self, plan: DirectPlan) -> None:
        self._manager.begin_use(plan.mapped)
        try:
            plan.check()
        except BaseException:
            self._manager.end_use(plan.mapped)
            raise

    def _forget_unmapped(self) -> None:
        current = {key: request for key, request in self._plans.items() if request.direct.is_current}
        self._plans = current if len(current) < _MOST_REMEMBERED else {}

    def _start_sweeper(self) -> None:
        if self._sweeper is None:
            self._sweeper = Repeater(self._sweep_quietly, _SWEEP_INTERVAL_S, "shm sweeper")

    def _sweep_quietly(self) -> float:
        with contextlib.suppress(MachineError):  # the server does not answer; it may the next time
            self.sweep()
        return _SWEEP_INTERVAL_S

    def _check_ordinary_is_served(self) -> None:
        if self._spec.paths == frozenset({DIRECT}):
            allowed = f"{PATHS_PARAMETER} of model {self._spec.name!r} allows only the direct path"
            raise DescriptorError("", "nothing", f"a descriptor: {allowed}")


def _without_generation(text: str) -> tuple[str, str, str]:
    """Split a JSON object's text around the digits of the generation; they are empty if there are none."""
    before, _, rest = text.partition(_MARK)
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return before, digits, rest[len(digits) :]
