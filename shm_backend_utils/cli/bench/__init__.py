"""Measure what this library costs, each figure against something else in the same run, next to what it is held to."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
