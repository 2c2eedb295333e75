"""Arrays on GPUs: over memory that has an owner, taken over from any library, copied, and as arrays of a library."""
