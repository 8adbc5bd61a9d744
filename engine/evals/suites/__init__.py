"""The suites, with their items and metrics."""
