"""The inputs that users pass, made ready to be written to their place in one copy."""
