"""Send photographs through a model on all paths; compare the results to the byte, measure, draw."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
