"""A model repository as it lies on the disk: its layout, its files, and what is wrong in a config.pbtxt."""
