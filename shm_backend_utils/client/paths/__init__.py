"""The ways of a call: in a slot, in memory registered at the server, in the request."""
