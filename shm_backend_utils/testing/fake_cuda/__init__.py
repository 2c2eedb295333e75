"""A CUDA driver for machines without a GPU, which NVIDIA's bindings take for theirs: on POSIX shared memory.

It works across processes, is late where CUDA may be late, and notes uses that CUDA leaves undefined. Its C
sources are built by ``gcc`` when it is loaded first.
"""

from .driver import FakeDriver, LiveCounts
from .tensor import Tensor

__all__ = ["FakeDriver", "LiveCounts", "Tensor"]
