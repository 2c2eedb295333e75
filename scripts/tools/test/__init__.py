"""Run the tests in one combination of versions or several, and tell the flaky ones from those that fail."""
