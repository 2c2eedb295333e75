"""A model's mapped memory, and the way from a request's claims to memory: registry, resolver, policy."""
