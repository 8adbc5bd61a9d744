"""The audit log as a chain of hashes."""
