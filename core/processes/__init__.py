"""Processes that are forked, and that end with their parent."""
