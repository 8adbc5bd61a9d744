"""Checkpoints of attempts: upload, restore, retention, permissions."""
