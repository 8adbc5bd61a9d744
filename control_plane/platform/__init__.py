"""Foundations of all nouns: settings, protocols of external systems, job states and events, pagination, secrets, file transfer."""
