"""Capacity planning: GPUs, storage, waits, cost, price and margin of a mix of jobs, before anything is bought."""
