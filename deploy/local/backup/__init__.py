"""Backup and restore of the embedded stack: both databases as of one moment, every object they refer to, and the home's keys."""
