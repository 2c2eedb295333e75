"""What several commands use, and tools that run in a checkout: servers, models, command lines and rounds."""
