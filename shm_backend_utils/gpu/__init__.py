"""GPU memory, shared by CUDA IPC or by descriptor; arrays, streams, events, and the CUDA runtime for them."""
