"""Shared memory: segments, managed regions and their locks, the reaper, the pool."""
