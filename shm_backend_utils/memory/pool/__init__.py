"""Slots of this process' own: regions that are taken for a call, held while arrays over them live, and used again."""
