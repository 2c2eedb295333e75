"""What several tools use."""
