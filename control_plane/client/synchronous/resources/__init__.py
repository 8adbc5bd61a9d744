# Written by `python -m tools.client` from asynchronous/resources/__init__.py: change that, and run it again.
"""The resources of the API, a class each."""
