"""Set up the checkout. The standard library alone, but for the server's installation, which runs in what was set up."""
