"""Watch shared memory, who has it mapped, and how many requests go by which path."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
