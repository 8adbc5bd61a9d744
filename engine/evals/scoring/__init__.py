"""Comparison of answers: scores, significance, judge, report."""
