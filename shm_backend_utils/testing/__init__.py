"""For tests: a stand-in for CUDA, for machines without a GPU."""
