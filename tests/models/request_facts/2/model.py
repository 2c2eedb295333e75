"""The same model in each of its versions."""

from teller import TritonPythonModel

__all__ = ["TritonPythonModel"]
