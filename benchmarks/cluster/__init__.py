"""The launcher of a cluster against a real API server."""
