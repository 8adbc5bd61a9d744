"""Adapters: the record of what a job produced, its package, its promotion, and the state that the fleet should reach."""
