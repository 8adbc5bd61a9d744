"""Generators of repository files from other files of the repository."""
