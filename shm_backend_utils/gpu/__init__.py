"""Memory of GPUs: allocations and mappings by CUDA IPC, events, the runtime behind them."""
