"""A model's mapped memory, and how a request's claims become memory: registry, resolver, policy."""
