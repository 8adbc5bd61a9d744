"""Shared by routes: authentication, errors, limits, streams, request bodies."""
