"""Generator of the Python client's types and synchronous modules: ``python -m tools.client``."""
