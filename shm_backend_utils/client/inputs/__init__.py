"""The inputs that users pass, prepared so that one copy writes them to their place."""
