"""Dagster's webserver for operators: in one process with the front that stands before it, and with its daemon and code server."""
