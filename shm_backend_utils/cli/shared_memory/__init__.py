"""What shared memory there is on this machine, and who has it."""
