"""A stand-in for CUDA, on POSIX shared memory: across processes, and late where CUDA may be late."""
