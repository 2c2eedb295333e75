"""Build the distributions of what is committed, twice; check what is in them; say what they are to the byte."""
