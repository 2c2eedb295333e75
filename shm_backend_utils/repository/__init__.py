"""A model repository on the disk: its layout, its files, and the faults of a config.pbtxt."""
