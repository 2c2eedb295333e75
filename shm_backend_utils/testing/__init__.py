"""For tests: regions around an inference, a probe for leaks, a stand-in for CUDA, Triton emulated."""
