"""What every subject is asked: suites with their items and metrics."""
