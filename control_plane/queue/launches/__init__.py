"""Dagster runs that are due: requested once, and their partitions."""
