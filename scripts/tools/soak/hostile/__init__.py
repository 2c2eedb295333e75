"""Honest clients beside hostile ones: how much longer the honest wait, what fails for them, which processes die."""
