"""Adapters: the record of a job's result, its package, its promotion, and the desired state of the inference servers."""
