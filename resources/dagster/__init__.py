"""Dagster: storage, launcher, run server, records, GraphQL."""
