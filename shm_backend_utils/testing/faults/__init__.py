"""Faults of practice, on demand: dead processes, lost memory, failing system calls."""
