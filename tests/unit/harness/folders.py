"""Model folders that tests write."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

TENSORS: Final = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

SESSION: Final = """
from shm_backend_utils.model import ShmSession
class TritonPythonModel:
    def initialize(self, args): self.session = ShmSession.from_args(args)
    def execute(self, requests): return self.session.serve(requests, self.infer)
    def infer(self, call): call.put("Y", call.input("X").numpy())
    def finalize(self): self.session.close()
"""
FINE: Final = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
BAD_CODE: Final = {
    "import": (
        "import nothing_such\n",
        "Internal: ModuleNotFoundError: No module named 'nothing_such'\n\nAt:\n",
        "what to do: install it",
    ),
    "no class": (
        "x = 1\n",
        "Internal: AttributeError: module '1.model' has no attribute 'TritonPythonModel'",
        "what to do: model.py needs a class of that name.",
    ),
    "syntax": ("def f(:\n", "Internal: SyntaxError: invalid syntax (model.py, line 1)", ""),
    "initialize": (
        "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('no weights')\n"
        "    def finalize(self): self.weights.close()\n",
        "Internal: ValueError: no weights\n\nAt:\n",
        "",
    ),
    "auto complete": (
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c): raise ValueError('no')\n",
        "Internal: ValueError: no\n\nAt:\n",
        "",
    ),
    "nothing completed": (
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c): return None\n",
        "Internal: auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
        "what to do: end auto_complete_config with return",
    ),
    "too early": (
        f"import triton_python_backend_utils as pb_utils\nTENSOR = pb_utils.Tensor\n{FINE}",
        "Internal: AttributeError: module 'triton_python_backend_utils' has no attribute 'Tensor'\n\nAt:\n",
        "what to do: use it in methods only: a server adds Tensor",
    ),
}
"""Code that does not load, what the server says of it, and what the harness adds."""


def folder_of(parent: Path, code: str, config: str | None = f'backend: "python"\n{TENSORS}', name: str = "m") -> Path:
    folder = parent / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(textwrap.dedent(code))
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder
