# Written by `python -m tools.client` from asynchronous/resources/__init__.py: change that, and run it again.
"""What the API offers: one class a resource."""
