"""Calls from model to model, by the Python backend's business logic scripting (BLS)."""
