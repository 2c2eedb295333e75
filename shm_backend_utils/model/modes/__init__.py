"""How ``execute`` can serve requests other than one by one: as batches and as streams."""
