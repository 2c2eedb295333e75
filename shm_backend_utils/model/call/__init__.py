"""One request as the model sees it: received, answered, and what ``model.py`` can do meanwhile."""

from .call import Call

__all__ = ["Call"]
