"""The direct path for code that stays on plain tritonclient, with regions that it has made and registered itself."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .. import dtypes
from ..client.transports.messages import Place
from ..errors import CallerError, TensorError, TensorTypeError
from ..gpu.memory.access import CudaAccess
from ..model_spec import BATCH_CARRIER
from ..protocol.claims import CudaRegionClaim, NamedRegionClaim, RegionClaim
from ..protocol.parameters import DESCRIPTOR_PARAMETER, encode_descriptor, parse_descriptor
from ..protocol.spans import InputSpan, OutputSpan, Table

__all__ = ["Attached", "CudaRegion", "attach"]


class CudaRegion(NamedTuple):
    """A region on a GPU, as it was given to ``register_cuda_shared_memory``.

    The handle, in base64, is as ``tritonclient.utils.cuda_shared_memory.get_raw_handle`` returns it, and ``device_id``
    is this process' number of the GPU. The handle opens a whole allocation, in which the region begins at ``offset``.
    Torch has many tensors in one: ``tensor.untyped_storage()._share_cuda_()`` has the handle and the offset.
    """

    raw_handle: bytes
    device_id: int
    byte_size: int
    offset: int = 0

    def __repr__(self) -> str:
        """Return a text without the handle, which is a secret that suffices to open the memory."""
        offset = f", offset={self.offset}" if self.offset else ""
        return f"CudaRegion(device_id={self.device_id}, byte_size={self.byte_size}{offset})"


class Attached(TypedDict):
    """Keyword arguments for any of tritonclient's calls that make a request."""

    inputs: list[Any]  # the inputs that still travel with the request
    outputs: list[Any] | None  # the wanted outputs
    parameters: dict[str, Any]  # with the descriptor


def attach(
    model: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None = None,
    *,
    batch_size: int | None = None,
    cuda_regions: Mapping[str, CudaRegion] | None = None,
    parameters: Mapping[str, Any] | None = None,
    cuda: CudaAccess | None = None,
) -> Attached:
    """Turn a request with Triton's shared memory into one whose memory the model maps itself.

    Write ``client.infer(model, **attach(model, inputs, outputs))`` instead of ``client.infer(model, inputs,
    outputs=outputs)``. This also works with ``async_infer``, streams, aio, gRPC and HTTP. You can use the return value
    for any number of requests, until you unregister a region. Nothing fences one request from the next: wait for each
    answer, and do not use the memory of a request without an answer. The server lets you unregister a region while the
    model works in it, so unregistering proves nothing.

    Parameters
    ----------
    model : str
        A model with a ``ShmSession``.
    inputs : sequence of InferInput
        Those with ``set_shared_memory`` go on the direct path; the others travel with the request.
    outputs : sequence of InferRequestedOutput, optional
        The same for outputs. The response does not have those on the direct path: read them from their regions.
    batch_size : int, optional
        The batch size of every input; needed if the model's ``max_batch_size`` is above 0.
    cuda_regions : mapping of str to CudaRegion, optional
        The regions that are on a GPU, by their registered names.
    parameters : mapping, optional
        Further parameters of the request.
    cuda : CudaAccess, optional
        Where the UUIDs of GPUs come from; by default NVIDIA's bindings of the driver.

    Raises
    ------
    TensorError, TableError
        A tensor is given twice, its size does not match its shape, it exceeds its region, or outputs overlap.
    CallerError
        No tensor lies in shared memory, or an argument is wrong.
    """
    _check_names(inputs, outputs or (), parameters or {})
    regions = _Regions(cuda_regions or {}, cuda or CudaAccess())
    input_spans: dict[str, InputSpan] = {}
    travelling: list[Any] = []
    for tensor in inputs:
        place = _place_of(tensor)
        if place is None:
            travelling.append(tensor)
        else:
            input_spans[tensor.name()] = _input_span(tensor, regions.index(place.region), regions.inside(place))
    output_spans: dict[str, OutputSpan] = {}
    wanted: list[Any] = []
    for tensor in outputs or ():
        place = _place_of(tensor)
        if place is not None:
            inside = regions.inside(place)
            output_spans[tensor.name()] = OutputSpan(regions.index(place.region), inside.offset, place.byte_size)
        wanted.append(tensor if place is None else type(tensor)(tensor.name()))
    if not input_spans and not output_spans:
        raise CallerError(f"no tensor for model {model!r} has a place in shared memory; call set_shared_memory first")
    if batch_size is not None:
        travelling.append(_batch_carrier(batch_size, inputs))
    text = encode_descriptor(model, Table(input_spans, output_spans, tuple(regions.claims.values())))
    parse_descriptor(text)  # raises here the error that the model would raise later
    return Attached(
        inputs=travelling,
        outputs=None if outputs is None else wanted,
        parameters={**(parameters or {}), DESCRIPTOR_PARAMETER: text},
    )


class _Regions:
    """The regions of one descriptor, each once."""

    def __init__(self, cuda_regions: Mapping[str, CudaRegion], cuda: CudaAccess) -> None:
        self.claims: dict[str, RegionClaim] = {}
        self._cuda_regions = cuda_regions
        self._cuda = cuda

    def index(self, name: str) -> int:
        """Return a region's number, from 1 on, and add the region if it is new."""
        if name not in self.claims:
            self.claims[name] = self._claim(name)
        return 1 + list(self.claims).index(name)

    def inside(self, place: Place) -> Place:
        """Return a place within the memory that its region's handle opens."""
        region = self._cuda_regions.get(place.region)
        return place if region is None else place._replace(offset=region.offset + place.offset)

    def _claim(self, name: str) -> RegionClaim:
        region = self._cuda_regions.get(name)
        if region is None:
            return NamedRegionClaim(name)
        try:
            handle = base64.b64decode(region.raw_handle, validate=True)
        except binascii.Error:
            raise CallerError(
                f"the handle of CUDA region {name!r} is not base64; expected the value of get_raw_handle"
            ) from None
        if region.offset < 0 or region.byte_size < 1:
            raise CallerError(
                f"CUDA region {name!r} begins at byte {region.offset} and has {region.byte_size} bytes; expected an "
                "offset of 0 or more, and at least 1 byte"
            )
        return CudaRegionClaim(
            handle, region.offset + region.byte_size, self._cuda.runtime.device_uuid(region.device_id), None
        )


def _check_names(inputs: Sequence[Any], outputs: Sequence[Any], parameters: Mapping[str, Any]) -> None:
    for what, tensors in (("input", inputs), ("output", outputs)):
        names = [_name_of(tensor) for tensor in tensors]
        for name in names:
            if names.count(name) > 1:
                raise TensorError(name, f"{what} {name!r} is given {names.count(name)} times; expected each one once")
    if DESCRIPTOR_PARAMETER in parameters:
        raise CallerError(f"parameter {DESCRIPTOR_PARAMETER!r} is set by attach itself; leave it out")


def _name_of(tensor: Any) -> str:
    try:
        name: str = tensor.name()
    except (AttributeError, TypeError):
        raise CallerError(
            f"found type {type(tensor).__name__}; expected tritonclient's InferInput and InferRequestedOutput"
        ) from None
    return name


def _place_of(tensor: Any) -> Place | None:
    """Return the place that ``set_shared_memory`` gave an ``InferInput`` or ``InferRequestedOutput``, gRPC or HTTP."""
    described = tensor._get_tensor()
    if isinstance(described, dict):
        parameters = described.get("parameters", {})
        region, byte_size = parameters.get("shared_memory_region"), parameters.get("shared_memory_byte_size", 0)
        offset = parameters.get("shared_memory_offset", 0)
    else:
        parameters = described.parameters
        if "shared_memory_region" not in parameters:
            return None
        region = parameters["shared_memory_region"].string_param
        byte_size = parameters["shared_memory_byte_size"].int64_param
        offset = parameters["shared_memory_offset"].int64_param if "shared_memory_offset" in parameters else 0
    return None if region is None else Place(region, offset, byte_size)


def _input_span(tensor: Any, region: int, place: Place) -> InputSpan:
    dtype = dtypes.BY_NAME.get(tensor.datatype())
    if dtype is None:
        raise TensorTypeError(
            tensor.name(),
            f"input {tensor.name()!r} has data type {tensor.datatype()!r}; expected one of {', '.join(dtypes.BY_NAME)}",
        )
    return InputSpan(dtype, tuple(tensor.shape()), region, place.offset, place.byte_size)


def _batch_carrier(batch_size: int, inputs: Sequence[Any]) -> Any:
    """Return the input whose shape tells Triton's batcher the batch size, made for the same protocol as the others."""
    if not inputs:
        raise TensorError(BATCH_CARRIER, "a batch size was given, but no inputs; give inputs, or leave batch_size out")
    carrier = type(inputs[0])(BATCH_CARRIER, [batch_size, 0], "UINT8")
    carrier.set_data_from_numpy(np.empty((batch_size, 0), np.uint8))
    return carrier
