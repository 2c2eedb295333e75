"""Memory on GPUs: allocations of this process for others, and its mappings of theirs."""
