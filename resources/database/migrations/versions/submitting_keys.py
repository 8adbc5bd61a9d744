"""Jobs and sweeps name the API key that submitted them.

Revision ID: submitting_keys
"""

from alembic import op

from resources.database.migrations.versions.initial import allow_tenants

revision = "submitting_keys"
down_revision = "released_models"

WRITTEN_BY_TENANTS = {"jobs": ("api_key_id", "", False), "sweeps": ("api_key_id", "", False)}
"""As in the first migration, and in addition to it."""


def upgrade() -> None:
    op.execute("ALTER TABLE jobs ADD api_key_id text; ALTER TABLE sweeps ADD api_key_id text")
    allow_tenants(WRITTEN_BY_TENANTS)
