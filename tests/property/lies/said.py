"""What a lying peer says of a model's outputs: by chance, and aimed at what might be believed."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from shm_backend_utils.dtypes import BY_NAME
from shm_backend_utils.model_spec import ModelSpec


def _config(name: str, **more: Any) -> dict[str, Any]:
    outputs = {
        "NUMBERS": ("FP32", [-1, 1]),
        "GRID": ("INT64", [-1, 3]),
        "WORDS": ("STRING", [-1]),
        "FLAGS": ("BOOL", [2]),
    }
    return {
        "name": name,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": ["-1", "1"], "optional": True}],
        "output": [
            {"name": name, "data_type": f"TYPE_{datatype}", "dims": [str(size) for size in dims]}
            for name, (datatype, dims) in outputs.items()
        ],
        "parameters": {"SHM_PATHS": {"string_value": "direct,triton-shm,inline"}},
        **more,
    }


CONFIGS: Final = (_config("m"), _config("frames", model_transaction_policy={"decoupled": True}))
SPEC: Final = ModelSpec.from_config(CONFIGS[0])
HINTS: Final = {"NUMBERS": 16, "GRID": 96, "WORDS": 64, "FLAGS": 2}
"""Room for the outputs: the first two have all that the truth takes, and so a place on every path."""


@dataclass(frozen=True)
class Said:
    """One output as an answer describes it, and the bytes that come with it."""

    name: Any
    datatype: Any
    shape: Any
    content: bytes


TRUTHS: Final = (
    Said("NUMBERS", "FP32", (4, 1), np.arange(4, dtype=np.float32).tobytes()),
    Said("GRID", "INT64", (4, 3), np.arange(12).tobytes()),
    Said("WORDS", "BYTES", (2,), b"\3\0\0\0abc\0\0\0\0"),
    Said("FLAGS", "BOOL", (2,), b"\0\1"),
)
_NAMES: Final = (*SPEC.outputs, "X", "SHM", "", "OUT9", "NUMBERS\0", "\U0001f4a5", "N" * 3000)
_DATATYPES: Final = (*BY_NAME, "", "FP128", "BYTES ", "bytes", "TYPE_FP32", "O", "object", "float32")
_SIZES: Final = (*range(-2, 6), 24, 255, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63))
OF_JSON: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 4.5, 1e300, float("nan"), 10**30),
    *("4", "", [], [[1]], ["x"], {}, {"a": 1}),
)
"""What JSON may have where something else is expected."""

_PREFIXES: Final = (0, 1, 3, 4, 5, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1)
_MOST_BYTES: Final = 1 << 20  # no output is so large here, whatever is said


def lies(chance: random.Random) -> list[Said]:
    """Return all outputs of an answer: most of them true, some left out, there twice, or in another order."""
    said = list(TRUTHS)
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        at = chance.randrange(len(said))
        said[at] = _lie(chance, said[at])
    if chance.random() < 0.1:
        chance.shuffle(said)
    if chance.random() < 0.05:
        said.append(_lie(chance, chance.choice(said)))
    if chance.random() < 0.05:
        said.pop(chance.randrange(len(said)))
    return said


def _lie(chance: random.Random, said: Said) -> Said:
    size = list(said.shape) or [0]
    size[chance.randrange(len(size))] = chance.choice(_SIZES)
    name, datatype = chance.choice(_NAMES), chance.choice(_DATATYPES)
    shape, content = _shape(chance), _content(chance, said.content)
    aimed = (
        replace(said, name=name),
        replace(said, datatype=datatype),
        replace(said, shape=shape),
        replace(said, shape=tuple(size)),
        replace(said, content=content),
        replace(said, datatype=datatype, content=content),
        replace(chance.choice(TRUTHS), name=said.name),
        Said(name, datatype, shape, content),
    )
    return chance.choice(aimed)


def _shape(chance: random.Random) -> tuple[int, ...]:
    rank = chance.choice((0, 1, 1, 1, 2, 2, 3, 4, 32, 33, 65, 300))
    if rank > 4:
        return (chance.choice((0, 1, 1, 2, -1)),) * rank
    return tuple(chance.choice(_SIZES) for _ in range(rank))


def _content(chance: random.Random, content: bytes) -> bytes:
    way = chance.randrange(5)
    if way == 0:
        return content[: chance.randrange(len(content) + 1)]
    if way == 1:
        return content + chance.randbytes(chance.randint(1, 64))
    if way == 2:
        return chance.randbytes(chance.randrange(65))
    lengths = [chance.choice(_PREFIXES) for _ in range(chance.randint(1, 3))]
    return b"".join(struct.pack("<I", length) + chance.randbytes(chance.randrange(6)) for length in lengths)


def random_text(chance: random.Random, texts: Sequence[str]) -> str:
    text = chance.choice(texts)
    return chance.choice((text, text, text[: chance.randrange(len(text) + 1)], text * 2))


def check_array(name: str, array: Any) -> None:
    """Raise AssertionError unless this is an output as the model's configuration has it. All of it is read."""
    expected = SPEC.outputs[name]
    assert expected.dtype is not None
    assert isinstance(array, np.ndarray), f"{name} is a {type(array)}"
    assert array.dtype == expected.dtype.numpy, f"{name} is {array.dtype}"
    assert array.ndim == len(expected.shape), f"{name} has shape {array.shape}"
    assert all(want in (-1, size) for size, want in zip(array.shape, expected.shape, strict=True)), array.shape
    assert array.nbytes <= _MOST_BYTES, f"{name} has {array.nbytes} bytes"
    if array.dtype.hasobject:
        assert all(type(each) is bytes for each in array.ravel().tolist()), f"{name} has {array.tolist()}"
    array.tobytes()
