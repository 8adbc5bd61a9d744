"""Peers, each run in an environment of its own by a script that knows nothing of this project."""
