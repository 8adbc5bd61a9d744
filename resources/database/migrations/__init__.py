"""Alembic scripts: one file per change of the schema, never edited once released."""
