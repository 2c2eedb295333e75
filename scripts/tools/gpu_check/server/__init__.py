"""Level 2: a real server. Most of it needs tritonclient, so nothing here is imported before it is needed."""
