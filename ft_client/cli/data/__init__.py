"""Datasets, files and contamination lists."""
