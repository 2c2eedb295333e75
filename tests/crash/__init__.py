"""What is left, and what the survivors see, when one of the three processes is killed."""
