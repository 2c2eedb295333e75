"""For tests: regions around an inference, a probe for what is left behind, and a stand-in for CUDA."""
