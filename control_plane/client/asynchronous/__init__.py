"""The asynchronous client, for asyncio and trio; the synchronous client is generated from it."""
