"""Memory on GPUs: what this process allocates for others, and what it maps of theirs."""
