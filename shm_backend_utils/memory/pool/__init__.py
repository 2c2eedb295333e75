"""This process' own slots: their regions are taken for a call, held while arrays over them live, and used again."""
