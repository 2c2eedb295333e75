"""What can be wrong in a model's configuration."""

from __future__ import annotations

from typing import Final

from ....model.config import PREFIX
from ....model_spec import BATCH_CARRIER, PATHS, PATHS_PARAMETER
from ..findings import Trouble

_CARRIER: Final = f'{{ name: "{BATCH_CARRIER}" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }}'
_ALL_PATHS: Final = f'parameters {{ key: "{PATHS_PARAMETER}" value: {{ string_value: "direct,triton-shm,inline" }} }}'

INPUTS_NOT_OPTIONAL: Final = Trouble(
    "inputs-not-optional",
    "Triton refuses a request of the direct path, which carries no bytes for the model's inputs.",
    "Add `optional: true` to each of these inputs in config.pbtxt, and load the model again.",
)
NO_SHM_INPUT: Final = Trouble(
    "no-shm-input",
    "The model has batches, and no input that tells Triton's batcher the batch size of a request without bytes.",
    f"Add the input `{_CARRIER}` in config.pbtxt, and load the model again.",
)
NO_SHM_PATHS: Final = Trouble(
    "no-shm-paths",
    "The model does not tell clients that it serves the direct path, so they take slower ones.",
    f"If its model.py uses ShmSession, add `{_ALL_PATHS}` in config.pbtxt, and load the model again.",
)
UNKNOWN_PATH: Final = Trouble(
    "unknown-path",
    f"The parameter {PATHS_PARAMETER} names a path that does not exist, so the model declares none.",
    f"Correct {PATHS_PARAMETER} in config.pbtxt, and load the model again: its words are "
    f"{', '.join(sorted(PATHS))}, separated by commas.",
)
DIRECT_NOT_DECLARED: Final = Trouble(
    "direct-not-declared",
    f"The parameter {PATHS_PARAMETER} leaves out the direct path, so clients take slower ones.",
    f"If its model.py uses ShmSession, add `direct` to {PATHS_PARAMETER} in config.pbtxt, and load the model again.",
    is_fatal=False,
)
UNKNOWN_PARAMETER: Final = Trouble(
    "unknown-parameter",
    f"A parameter whose name begins with {PREFIX} is unknown to this library, which refuses to load the model.",
    "Correct its name in config.pbtxt, or remove it, and load the model again.",
)
BAD_PARAMETER: Final = Trouble(
    "bad-parameter",
    "A parameter of this library has a value that is not valid, and the model does not load.",
    "Correct the value in config.pbtxt, and load the model again.",
)
REFUSED_LINE: Final = Trouble(
    "refused-line",
    "The configuration has something that no ShmSession can serve, and the model does not load.",
    "Remove it from config.pbtxt, or serve this model without ShmSession.",
)
RESPONSE_CACHE: Final = Trouble(
    "response-cache",
    "Triton's response cache looks at input tensors only: a cached answer would leave the client's memory as it was.",
    "Remove `response_cache` from config.pbtxt, and load the model again.",
)
