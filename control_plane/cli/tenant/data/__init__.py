"""Datasets, files and evaluation suites."""
