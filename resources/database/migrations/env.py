"""Alembic's entry point: runs on the connection that ``resources.database.migrate`` passes."""

from alembic import context

from control_plane.platform.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
