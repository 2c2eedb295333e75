"""Set up the checkout. Nothing of it needs more than the standard library: there is nothing else yet."""
