"""Generates the synchronous half and the types of the Python client: ``python -m tools.client``."""
