"""Writes the generated half of the Python client: ``python -m tools.client``."""
