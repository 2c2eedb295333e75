"""A CUDA driver for machines without a GPU, on POSIX shared memory; NVIDIA's bindings load it like the real one.

It works across processes, delays work that CUDA may delay, and records uses that CUDA leaves undefined. ``gcc`` builds
its C sources when it is first loaded.
"""

from .driver import FakeDriver, LiveCounts
from .tensor import Tensor

__all__ = ["FakeDriver", "LiveCounts", "Tensor"]
