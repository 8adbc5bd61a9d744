"""Detects rows that repeat evaluation suites."""
