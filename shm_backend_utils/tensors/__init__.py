"""Tensors where they lie: views, strings, DLPack, buffer attributes."""
