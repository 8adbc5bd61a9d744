"""Measurements of the evaluation stage."""
