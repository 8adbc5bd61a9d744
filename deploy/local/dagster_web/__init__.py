"""Dagster's webserver for operators, in one process with its access control."""
