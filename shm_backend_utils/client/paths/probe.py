"""Asking a session about itself: in new memory, and by requests without tensors. ``model.py`` sees none of them."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any, Final, NamedTuple

from ...dtypes import BY_NAME
from ...errors import PeerError, ProbedError, code_in
from ...memory.descriptors import PRIVATE
from ...memory.managed import RegionKind
from ...memory.pool.slot import SlotRegion
from ...model_spec import ModelSpec
from ...protocol.layout import PAGE_SIZE
from ...protocol.probe import NONCE_LENGTH, digest_of, encode_probe
from ...protocol.spans import InputSpan, OutputSpan
from ..errors import InferenceError
from ..options import RequestOptions
from ..steps import Send, SendForStream, Steps
from ..transports.messages import Codec
from .call import is_answer

__all__ = ["ProbeAnswer", "asked", "probe_model"]

_REPORT_ROOM: Final = 4 * PAGE_SIZE


class ProbeAnswer(NamedTuple):
    report: dict[str, Any] | None  # the items that ``docs/protocol.md`` lists, in JSON's types; None without a report
    refusal: str  # the words of the model or the server instead; empty if it was executed as no probe

    @property
    def code(self) -> str:
        """The refusal's code, such as ``shm:gone``; empty if it has none of this package's."""
        return code_in(self.refusal)


def asked(
    codec: Codec, spec: ModelSpec, slot: tuple[str, int], deadline: float, version: str = ""
) -> Steps[str | None]:
    """Send a model a request without tensors, and return the text of the refusal; None if it was executed."""
    options = RequestOptions(model_version=version)
    if spec.sequences:
        number = secrets.randbits(48) + 1
        options["sequence_id"] = str(number) if spec.names_sequences else number
        options["sequence_start"] = options["sequence_end"] = True
    message = codec.infer(spec.name, options, batch_size=1 if spec.max_batch_size else None, slot=slot)
    try:
        yield SendForStream(message, deadline) if spec.is_decoupled else Send(message, deadline)
    except InferenceError as error:
        if not is_answer(error):
            raise
        return str(error.message())
    return None


def probe_model(
    codec: Codec, spec: ModelSpec, kind: RegionKind, deadline: float, *, with_gpus: bool
) -> Steps[ProbeAnswer]:
    """Have a model read a nonce in new memory, and write its report there. ``model.py`` does not see the request."""
    region = SlotRegion(PAGE_SIZE + _REPORT_ROOM, 1, PAGE_SIZE, PRIVATE, kind=kind)
    try:
        nonce = os.urandom(NONCE_LENGTH)
        begin, slot = region.data_offset, region.slots[0]
        report = begin + PAGE_SIZE
        room = region.byte_size - report
        region.buffer[begin : begin + NONCE_LENGTH] = nonce
        place = InputSpan(BY_NAME["UINT8"], (NONCE_LENGTH,), 0, begin, NONCE_LENGTH)
        generation = slot.begin(encode_probe(place, OutputSpan(0, report, room), with_gpus=with_gpus))
        address = slot.address_pattern % spec.name, generation
        answer = ProbeAnswer(None, (yield from asked(codec, spec, address, deadline)) or "")
        if answer.code != ProbedError.code:
            return answer
        if not slot.is_completed:
            raise PeerError(f"model {spec.name!r} says that it has answered a probe, and has not written to its memory")
        return ProbeAnswer(_read(bytes(region.buffer[report : report + room]), nonce, spec.name), answer.refusal)
    finally:
        region.destroy()


def _read(data: bytes, nonce: bytes, model: str) -> dict[str, Any]:
    try:
        said: Any = json.loads(data.partition(b"\0")[0])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or said.get("digest") != digest_of(nonce):
        raise PeerError(f"model {model!r} has answered a probe with something that is no report on its nonce")
    return said
