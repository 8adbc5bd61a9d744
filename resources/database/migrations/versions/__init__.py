"""Migrations in order; a revision names the one before it."""
