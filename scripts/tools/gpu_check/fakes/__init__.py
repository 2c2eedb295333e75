"""A GPU that does not exist, and array libraries for it, to rehearse the check where there is none.

NVIDIA's bindings and all of this package run as ever, on a driver that is a fake. CuPy and PyTorch do not run on that,
so what the check and the sample models use of them is here. What is measured so says nothing.
"""
