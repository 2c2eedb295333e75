"""The probe: a request that a session answers by itself, in the client's memory. Pure: bytes in, bytes out.

A probe's table is like any other (:mod:`.table`), except that the word ``probe`` is 1 or 2. It has one input, a nonce
of UINT8, and room for one output, both in the slot's own region; their names do not matter. The session writes a report
to the output: a JSON object in UTF-8, whose ``digest`` is the SHA-256 of the nonce. The digest proves that the model
has read and written this memory. The request does not reach ``model.py``: it ends as a refusal (``shm:probed``), so
that other requests take no time for probes.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

from ..errors import ProbedError, TableError
from . import table
from .layout import VERSION
from .spans import InputSpan, OutputSpan, Table

__all__ = [
    "ALIVE_ADDRESS",
    "NONCE_LENGTH",
    "AskedForLifeError",
    "Probe",
    "decode_probe",
    "digest_of",
    "encode_probe",
    "is_probe",
]

NONCE_LENGTH: Final = 32
"""Bytes of the nonce that this package's clients send; a model takes 16 to 64."""

ALIVE_ADDRESS: Final = f"{VERSION}/alive"
"""The value of ``shm_slot`` that asks a session for a sign of life: an empty response, not counted as a refusal."""

_FIELD: Final = struct.Struct("<H")
_GENERATION_LENGTH: Final = 8
_PLAIN: Final = 1
_WITH_GPUS: Final = 2
_NONCE_LENGTHS: Final = range(16, 65)
_NONCE, _REPORT = "nonce", "report"


class AskedForLifeError(ProbedError):
    """The request asks for a sign of life: it ends at once, with a response that is no error."""


class Probe(NamedTuple):
    """A checked probe. The nonce and the room for the report are in the slot's own region."""

    generation: int  # the slot's
    nonce: InputSpan
    report: OutputSpan
    with_gpus: bool  # whether to report GPUs, too, for which the model loads the driver


def digest_of(nonce: bytes) -> str:
    """Return the digest in the report of a model that has read the nonce: 64 hexadecimal digits."""
    return hashlib.sha256(nonce).hexdigest()


def encode_probe(nonce: InputSpan, report: OutputSpan, *, with_gpus: bool) -> bytes:
    """Return a probe's table in its binary form, without the generation in front."""
    encoded = bytearray(table.encode(Table({_NONCE: nonce}, {_REPORT: report})))
    _FIELD.pack_into(encoded, table.PROBE_OFFSET - _GENERATION_LENGTH, _WITH_GPUS if with_gpus else _PLAIN)
    return bytes(encoded)


def is_probe(data: bytes) -> bool:
    """Return whether a copy of the client's half of a record has a probe, as its word ``probe`` shows."""
    return _FIELD.unpack_from(data, table.PROBE_OFFSET)[0] in (_PLAIN, _WITH_GPUS)


def decode_probe(data: bytes, data_begin: int, byte_size: int) -> Probe:
    """Check a probe as :func:`.table.decode` checks a table; TableError if it breaks the protocol."""
    (word,) = _FIELD.unpack_from(data, table.PROBE_OFFSET)
    plain = data[: table.PROBE_OFFSET] + _FIELD.pack(0) + data[table.PROBE_OFFSET + _FIELD.size :]
    generation, asked = table.decode(plain, data_begin, byte_size)
    if len(asked.inputs) != 1 or len(asked.outputs) != 1 or asked.regions or asked.ring is not None:
        raise TableError("probe", "other tensors, regions or frames", "one input and one output in the slot's region")
    (nonce,), (report,) = asked.inputs.values(), asked.outputs.values()
    if nonce.dtype.name != "UINT8" or nonce.byte_size not in _NONCE_LENGTHS:
        expected = f"{_NONCE_LENGTHS[0]} to {_NONCE_LENGTHS[-1]} bytes of UINT8"
        raise TableError("probe", f"an input of {nonce.byte_size} bytes of {nonce.dtype.name}", expected)
    return Probe(generation, nonce, report, word == _WITH_GPUS)
