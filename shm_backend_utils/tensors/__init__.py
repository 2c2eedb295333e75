"""Tensors in place: views, strings, DLPack, buffer attributes."""
