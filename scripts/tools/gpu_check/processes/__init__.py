"""Level 1: a client's and a model's process, and no server."""
