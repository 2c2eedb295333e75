"""Measure what this library costs, each figure beside something else in the same run, and its limit."""
