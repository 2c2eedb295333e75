"""For tests: regions around an inference, a probe for what is left behind, stand-ins for CUDA and Triton's backend."""
