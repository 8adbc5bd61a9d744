"""From an accepted job to a packed one."""
