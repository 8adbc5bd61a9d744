"""Checks for errors in an example and problems of a dataset: one module per question."""
