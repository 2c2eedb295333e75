"""Measure what this library costs, and hold the figures to their limits."""
