"""What goes wrong in practice, made to happen: dead processes, memory that is gone, calls of the system that fail."""
