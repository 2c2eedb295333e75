"""The received side of a request: its parameters, the memory that it names, and its inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from json.scanner import make_scanner
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...dtypes import BYTES
from ...errors import ClosedError, MissingTensorError, ModelError, ProbedError, RegionGoneError, TableError, name_list
from ...gpu.arrays.device_view import DeviceView
from ...gpu.uses import DeviceUses
from ...model_spec import BATCH_CARRIER
from ...protocol.claims import CudaDescriptorClaim, CudaRegionClaim
from ...protocol.layout import STARTED
from ...protocol.parameters import (
    DESCRIPTOR_PARAMETER,
    GENERATION_PARAMETER,
    SLOT_PARAMETER,
    parse_address,
    parse_descriptor,
    parse_generation,
)
from ...protocol.probe import ALIVE_ADDRESS, AskedForLifeError
from ...protocol.results import NO_RESULTS, with_events
from ...protocol.spans import InputSpan, OutputSpan, Ring, Table
from ...tensors.strings import Strings
from ...tensors.view import DIRECT, MemoryType, StringsView, TensorView
from ..context import Context, answer_probe
from ..forward.ordinary import Forwarding
from ..mapping.mapped import MappedSlot, ProbeFound, replayed, stale
from ..mapping.memory import HostMemory, InputView, MappedMemory
from ..mapping.resolver import FurtherRegions
from ..triton import InBandView, view_of
from .checks import check_direct_is_served, check_rows, check_table, shares_no_memory

__all__ = ["Output", "ReceivedRequest"]

_OURS: Final = "shm_"  # the prefix of this package's parameters
_NO_MEMORY: Final = HostMemory(np.empty(0, np.uint8))  # region 0 of a request without a slot; no tensor lies in it

# The scanner inside json.loads. Calling the scanner directly saves time in every request.
scan_json: Final[Callable[[str, int], tuple[dict[str, Any], int]]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]


class Output(NamedTuple):
    """One output that ``model.py`` has made."""

    view: TensorView  # of the output's memory
    encoded: bytes = b""  # the output's entry in the results; commit() makes it if the output is in the response
    region: int | None = None  # the region that holds the output; None if the output goes back through Triton
    source: Any = None  # a DeviceArray that model.py fills instead of the view; commit() copies it there
    was_copied: bool = False  # whether the library copies the values, to the view's memory or through Triton


class ReceivedRequest:
    """The half of a :class:`Call` that reads inputs: from the client's memory, or from Triton's tensors."""

    _made_by = "open"

    # The defaults are class attributes, so that making a call is fast. Methods replace them, and never modify them.
    _is_open: bool | None = None  # None until the call begins
    _parameters: dict[str, Any] | None = None
    _tensors: dict[str, Any] | None = None
    _requested: list[str] | None = None  # the requested outputs; only streams keep them, for all responses
    _notice = ""
    _slot: MappedSlot | None = None
    _generation = 0
    _further: FurtherRegions | None = None
    _memories: Sequence[MappedMemory] = ()
    _strings: Mapping[str, StringsView] = MappingProxyType({})
    _pending: set[Forwarding] | None = None
    _response_parameters: dict[str, str | bool | int] | None = None
    _rooms: Mapping[str, OutputSpan] = MappingProxyType({})
    _has_results = True  # whether a client with a slot reads the results there
    _results = NO_RESULTS
    table: Table | None = None
    devices: DeviceUses | None = None
    response: Any = None

    def __init__(self, context: Context, request: Any) -> None:
        self._arrived = time.monotonic()
        self._context = context
        self._request = request
        self.outputs: dict[str, Output] = {}

    def begin(self) -> None:  # noqa: PLR0912, PLR0915  # one function, as each more would slow down every request
        """Accept the request and take its slot; after a ShmError, the call holds none of the client's memory."""
        context = self._context
        if context.fills_slots and not self._request.requested_output_names():
            raise ProbedError("Triton fills an empty slot of a batch with this request, and drops the answer")
        text = self._request.parameters()
        if _OURS in text:
            parameters = self._parameters = scan_json(text, 0)[0]
            address = parameters.pop(SLOT_PARAMETER, None)
            generation = parameters.pop(GENERATION_PARAMETER, None)
            slot = context.slots.get(address) or self._find_slot(address)
            table: Table | None = None
            if slot is not None:
                if type(generation) is not int or generation < 1:
                    parse_generation(generation)
                try:
                    try:
                        table = slot.claim(generation, context.form)
                    except RegionGoneError:
                        slot = context.resolver.reopen_slot(address, slot)
                        table = slot.claim(generation, context.form)
                except ProbeFound as found:
                    answer_probe(context, slot, found.probe)
                self._slot = slot
                self._generation = generation
                self._memories = slot.memories
            try:
                if DESCRIPTOR_PARAMETER in parameters:
                    table = self._named_table(parameters.pop(DESCRIPTOR_PARAMETER)) or table
                if table is not None:
                    if not table.fits:
                        self._open_more(table)
                    spec = context.request_spec
                    if spec.max_batch_size:
                        rows = None
                        for tensor in self._request.inputs():
                            if tensor.name() == BATCH_CARRIER:
                                rows = tensor.shape()[0]
                        check_rows(table, rows)
                    if not table.fits:
                        check_table(spec, table, self._memories)
                        if spec is not context.spec:  # reshape inputs, as Triton does in band
                            reshaped = {
                                n: s._replace(shape=spec.inputs[n].reshaped(s.shape)) for n, s in table.inputs.items()
                            }
                            table = table._replace(inputs=reshaped)
                    if slot is not None:
                        stamps = slot.record.model_words  # start(), inlined, as every request comes here
                        if stamps[STARTED] >= generation:
                            raise replayed()
                        stamps[STARTED] = generation
                    self.table = table
                    self._rooms = table.outputs
            except BaseException:
                if self._further is not None:
                    self._further.unmap_passing()  # no GPU has used this memory yet
                self._release()
                raise
        if self.table is None and not context.takes_in_band:
            raise shares_no_memory(context.spec)
        self._is_open = True

    def input(self, name: str) -> TensorView:
        """Return one input.

        Parameters
        ----------
        name : str
            As in the model's configuration: an input, or a ``control_input`` of the sequence batcher.

        Returns
        -------
        TensorView
            C-contiguous and read-only, over the client's own memory or Triton's tensor. It has the shape and dtype that
            the client sent, or the shape of the configuration's ``reshape``. Arrays made from it keep the memory
            mapped, but after the call that memory may serve another request.

        Raises
        ------
        MissingTensorError
            The request does not have this input.
        ModelError
            The model's configuration does not have this input.
        """
        if not self._is_open:
            raise self._not_open()
        table = self.table
        if table is not None:
            span = table.inputs.get(name)
            if span is not None:
                dtype, shape, region, offset, byte_size = span
                memory = self._memories[region]
                if type(memory) is HostMemory and dtype is not BYTES:
                    array: npt.NDArray[Any] = np.ndarray(shape, dtype.numpy, memory.array, memory.begin + offset)
                    array.setflags(write=False)  # a read-only buffer is slower: NumPy then raises and drops an error
                    found = InputView(name, array, dtype, DIRECT, memory.memory_type)
                    found.table = table
                    return found
                if name in self._strings:
                    return self._strings[name]
                view = memory.view(name, offset, byte_size, dtype, shape, writable=False)
                assert view is not None  # begin() has checked the input's size, and refuses strings on a GPU
                return view
        view = self._input_in_band(name)
        if view is None:
            raise MissingTensorError(name, f"the request has no input {name!r}, which the model needs{self._notice}")
        return view

    def find_input(self, name: str) -> TensorView | None:
        """Return one input, as :meth:`input` does; None if the request does not have it."""
        if self.table is not None and name in self.table.inputs:
            return self.input(name)
        self._check_open()
        return self._input_in_band(name)

    def read_strings(self) -> None:
        """Read all strings in the client's memory now, for later :meth:`input` calls; TensorError for bad lengths."""
        table = self.table
        if table is not None:
            texts = [(name, self.input(name)) for name, span in table.inputs.items() if span.dtype is BYTES]
            self._strings = {name: StringsView(name, Strings.of(name, view.numpy()), DIRECT) for name, view in texts}

    def span_of(self, name: str) -> tuple[MappedMemory, InputSpan] | None:
        """Return the memory and the span of an input in the client's memory; None if the input is not there."""
        span = None if self.table is None else self.table.inputs.get(name)
        return None if span is None else (self._memories[span.region], span)

    @property
    def awaited_regions(self) -> list[int]:
        """The numbers of the further regions where GPUs may work on after the answer; empty if they may not."""
        uses, table, found = self.devices, self.table, list[int]()
        if self._slot is None or table is None or self._further is None:
            return found
        if self._further.passing or self._further.borrowed or not uses or not uses.are_named or uses.reads_host:
            return found
        if any(each.region is None or self._memories[each.region].device is None for each in self.outputs.values()):
            return found  # the client does not wait for an output on the host
        memories = [self._memories[each.region] for each in table.inputs.values()]
        if any(isinstance(each, HostMemory) and each.memory_type is MemoryType.CPU_PINNED for each in memories):
            return found  # a GPU may still read an input that the client fills again after the answer
        for number, claim in enumerate(table.regions, 1):
            if isinstance(claim, CudaRegionClaim | CudaDescriptorClaim):
                if not claim.waits or claim.fence:
                    return []
                found.append(number)
        has_room = len(with_events(self._results, found)) <= self._slot.record.results_room
        return found if has_room else []

    def _find_slot(self, address: Any) -> MappedSlot | None:
        """Return the slot of an address that is new to this session; None without an address or for another model."""
        if address is None:
            return None
        if address == ALIVE_ADDRESS:
            self._context.forwarder.check_has_memory()
            raise AskedForLifeError("this session is alive")
        parsed = parse_address(address)
        if parsed.model != self._context.spec.name:
            self._notice = f"; its {SLOT_PARAMETER} is for another model"
            return None
        check_direct_is_served(self._context.spec, SLOT_PARAMETER)
        return self._context.resolver.open_slot(address, parsed)

    def _named_table(self, descriptor: Any) -> Table | None:
        """Return the table in a descriptor of registered regions; None if the descriptor is for another model."""
        model, table = parse_descriptor(descriptor)
        spec = self._context.spec
        if model != spec.name:
            self._notice = f"; its {DESCRIPTOR_PARAMETER} descriptor is for another model, see its field `model`"
            return None
        check_direct_is_served(spec, DESCRIPTOR_PARAMETER)
        if self._slot is not None:
            raise TableError(DESCRIPTOR_PARAMETER, f"a descriptor beside {SLOT_PARAMETER}", "one of the two")
        self._memories = (_NO_MEMORY,)
        return table

    def _open_more(self, table: Table) -> None:
        if table.ring is not None:
            self._take_ring(table.ring, table.outputs)
        if not table.regions:
            return
        self._further = self._context.resolver.open_further(table, self._slot)
        self._memories = (*self._memories, *self._further.memories)
        # A lender that gives up first raises its slot's generation. So compare the generation again after borrowing.
        if self._further.borrowed and self._slot is not None and self._slot.record.generation != self._generation:
            raise stale()
        spans: list[InputSpan | OutputSpan] = [*table.inputs.values(), *table.outputs.values()]
        for number, memory in enumerate(self._further.memories, 1):
            if memory.device is not None and number in [span.region for span in spans]:
                self._use_device(memory.device)

    def _take_ring(self, ring: Ring, outputs: Mapping[str, OutputSpan]) -> None:
        name = self._context.spec.name
        raise TableError("frame_count", str(ring.frames), f"0: model {name!r} answers without a stream")

    def _tensors_in_band(self) -> dict[str, Any]:
        tensors = self._tensors
        if tensors is None:
            tensors = self._tensors = {}
            for tensor in self._request.inputs():
                tensors[tensor.name()] = tensor
        return tensors

    def _input_in_band(self, name: str) -> TensorView | None:
        """Return a read-only view of an input that Triton delivered; None if missing, ModelError if unknown."""
        spec = self._context.spec
        tensor_spec = spec.inputs.get(name) or spec.controls.get(name)
        if tensor_spec is None:
            raise ModelError(f"model.py asked for input {name!r}; the model has {name_list(name, spec.inputs)}")
        tensor = self._tensors_in_band().get(name)
        if tensor is None:
            return None
        dtype, backend = tensor_spec.dtype, self._context.backend
        if dtype is not None and dtype is not BYTES and tensor.is_cpu():
            return InBandView(name, tensor, dtype, backend)
        view = view_of(tensor, dtype, backend, self._context.arrays)
        if isinstance(view, DeviceView):
            self._use_device(view.device)
        return view

    def _use_device(self, device: int) -> DeviceUses:
        uses = self._device_uses()
        uses.add(device)
        return uses

    def _device_uses(self) -> DeviceUses:
        uses = self.devices
        if uses is None:
            uses = self.devices = DeviceUses(self._context.arrays)
        return uses

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._not_open()

    def _not_open(self) -> ClosedError | ModelError:
        if self._is_open is None:
            return ModelError(f"this call has not begun; enter it first: with session.{self._made_by}(request) as call")
        return ClosedError("this call", "copy data to keep before the call ends, for example with np.array(view)")

    def _release(self) -> None:
        """Release the request's memory without writing to the slot's record, so that the client sees no completion."""
        self._is_open = False
        if self._further is not None:
            self._further.release()
            self._further = None
        if self._slot is not None:
            slot, self._slot = self._slot, None
            slot.lease.give_back()
        self._memories = ()
