"""The client for asyncio and trio: the source of both halves."""
