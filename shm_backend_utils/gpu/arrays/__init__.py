"""Arrays on GPUs: over owned memory, imported from any library, copied, and exported to a library."""
