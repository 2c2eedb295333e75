"""GPU memory: allocations and mappings by CUDA IPC, arrays, streams, events, and the CUDA runtime for them."""
