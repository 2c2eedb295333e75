"""Servers and models that lie by the million, whose lies come to nothing but an error, or an answer that may be."""
