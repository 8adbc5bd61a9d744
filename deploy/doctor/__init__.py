"""What ``ft admin doctor`` checks."""
