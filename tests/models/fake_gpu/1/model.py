"""The model with the settings that configurations have if they say nothing."""

from deeds import TritonPythonModel

__all__ = ["TritonPythonModel"]
