"""Measure the cost of this library: each figure beside something else in the same run, and its limit."""
