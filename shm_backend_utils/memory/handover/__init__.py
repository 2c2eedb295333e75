"""How a client hands its sealed regions over to models: by descriptors, over a socket."""
