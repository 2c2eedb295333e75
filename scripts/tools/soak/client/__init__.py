"""A client of the soak: the program, what it sends and checks, and how the soak starts it and sees how it gets on."""
