"""Regions: the memory that a client makes for sharing, as both halves see it."""
