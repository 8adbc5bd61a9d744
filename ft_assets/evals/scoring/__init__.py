"""Answers compared: scores, significance, judge, report."""
