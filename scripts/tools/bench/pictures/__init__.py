"""The bench's pictures, drawn from the curves of a run: one module for each, and what they have in common."""

from .drawing import Drawing
from .gallery import PICTURES, drawings_of

__all__ = ["PICTURES", "Drawing", "drawings_of"]
