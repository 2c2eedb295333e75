"""Honest clients beside hostile ones: how much longer the honest ones wait, what fails for them, and what dies."""
