"""Find out what keeps requests from the direct path, and say what to do about it."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
