# Written by `python -m tools.client` from asynchronous/__init__.py: change that, and run it again.
"""The synchronous client, for asyncio and trio; the synchronous client is generated from it."""
