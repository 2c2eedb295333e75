"""One request as ``model.py`` sees it: its inputs, its outputs, and the actions in between."""

from .call import Call

__all__ = ["Call"]
