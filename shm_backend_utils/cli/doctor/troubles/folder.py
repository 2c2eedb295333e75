"""What can be wrong in a model's folder."""

from __future__ import annotations

from typing import Final

from ....repository.layout import CONFIG_FILE
from ..findings import Trouble

NOT_A_MODEL: Final = Trouble(
    "not-a-model",
    "The folder is neither a model's nor a repository of models, so there is nothing to examine.",
    f"Name a folder with {CONFIG_FILE} or 1/model.py, or one that has such folders.",
)
UNREADABLE: Final = Trouble(
    "unreadable",
    "A file or folder of the model cannot be read.",
    "Let this user and the server's user read it: chmod a+rX, or change its owner.",
)
CONFIG_NOT_READ: Final = Trouble(
    "config-not-read",
    f"{CONFIG_FILE} is not a model's configuration in protobuf's text format, and Triton does not load the model.",
    "Correct the line that is named.",
)
BAD_TENSOR: Final = Trouble(
    "bad-tensor",
    f"An input or output in {CONFIG_FILE} is incomplete or not valid, and Triton does not load the model.",
    f"Correct it in {CONFIG_FILE}.",
)
NO_CONFIG: Final = Trouble(
    "no-config",
    f"There is no {CONFIG_FILE}, and model.py does not complete the configuration by itself.",
    f"Add {CONFIG_FILE}, or auto_complete_config to model.py that ends with shm_backend_utils.model.auto_complete.",
)
OTHER_NAME: Final = Trouble(
    "other-name",
    f"{CONFIG_FILE} gives the model another name than its folder has, and Triton does not load it.",
    "Rename one of them, or leave `name` out.",
)
NO_VERSION: Final = Trouble(
    "no-version-folder",
    "The model has no folder of a version, and Triton does not load it.",
    "Put the model's code into 1/model.py in its folder.",
)
NO_CODE: Final = Trouble(
    "no-model-code",
    "A folder of a version lacks the model's code, and Triton does not load that version.",
    "Put model.py, or what default_model_filename names, into it.",
)
NOT_RETURNED: Final = Trouble(
    "not-returned",
    "A call of the session answers requests, and execute drops the answers: clients wait until their time is over.",
    "Write `return` before it: `return self.session.serve(requests, self.infer)`.",
)
OTHER_MODE: Final = Trouble(
    "other-mode",
    "Code and configuration do not agree on whether the model is decoupled, and requests fail.",
    "For serve_streams write `model_transaction_policy { decoupled: true }` in config.pbtxt; for serve leave it out.",
)
CODE_DOES_NOT_PARSE: Final = Trouble(
    "code-does-not-parse",
    "This interpreter cannot parse the model's code, and the model does not load.",
    "Correct the line that is named.",
)
NO_MODEL_CLASS: Final = Trouble(
    "no-model-class",
    "The model's code defines no TritonPythonModel, and Triton does not load it.",
    "Name the model's class TritonPythonModel.",
)
UNKNOWN_NAME: Final = Trouble(
    "unknown-name",
    "The model's code names a tensor that its configuration does not have, or another model that is not there.",
    "Correct the name in the line that is named, or in the configuration.",
)
ORDINARY_MODEL: Final = Trouble(
    "ordinary-model",
    "The model uses nothing of this library: its requests take Triton's own paths.",
    "Nothing, if that is what you want; else use ShmSession in model.py, and set SHM_PATHS in config.pbtxt.",
    is_fatal=False,
)
OTHER_COPY: Final = Trouble(
    "other-copy",
    "The model's folder has a copy of this library that is not of this release, and model.py may import it.",
    "Remove it, put this release there by `pip install --no-deps --target MODEL_DIR/VERSION WHEEL`, and load the model "
    "again.",
)
