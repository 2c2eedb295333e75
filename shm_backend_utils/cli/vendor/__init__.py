"""Put the model half into a model's folder, so that model.py finds it on a server that does not have the package."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
