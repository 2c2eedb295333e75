"""The paths of a call: in a slot, in memory registered at the server, or in the request."""
