"""For tests: regions around an inference, a probe for what is left behind, a stand-in for CUDA, Triton emulated."""
