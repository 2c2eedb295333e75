"""Questions to a server's HTTP port, by the model half and the commands, with answers in bounded time."""
