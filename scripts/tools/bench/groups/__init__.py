"""What the bench measures. A row of its report is a ``Figure``; what it is held to stands above its group."""
