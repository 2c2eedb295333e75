"""Send checked requests through a real server for a while, and break everything that can break meanwhile."""
