"""What a model has mapped, and how a request's words become memory: registry, resolver, policy."""
