"""Estimates: how long a job takes, what it costs, and what a base model allows."""
