"""The commands of the checkout: the files without a suffix. :mod:`scripts.tools` does the work."""
