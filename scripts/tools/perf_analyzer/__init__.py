"""Have perf_analyzer measure the direct path next to what it knows itself."""
