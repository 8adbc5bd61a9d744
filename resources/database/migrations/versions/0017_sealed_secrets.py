"""URLs and signing secrets of webhook endpoints are encrypted with the installation's key.

Revision ID: 0017
"""

import importlib
import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

from control_plane.notifications.signatures import opened, sealed_secrets, sealed_url
from control_plane.platform import settings

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

Row = dict[str, Any]


def upgrade() -> None:
    op.add_column("webhook_endpoints", sa.Column("sealed_url", sa.Text(), nullable=False, server_default=""))

    def sealed(row: Row) -> Row:
        found = settings.load()
        return {**(sealed_url(found, row["url"]) if row["url"] else {"url": "", "sealed_url": ""}), **sealed_secrets(found, row["secrets"])}

    _rewrite(sealed)
    # The digest that tells of a change is of the whole URL.
    op.execute(_told().replace("|| (entry ->> secret)", "|| (entry ->> CASE secret WHEN 'url' THEN 'sealed_url' ELSE secret END)"))


def downgrade() -> None:
    op.execute(_told())
    _rewrite(lambda row: {**opened(settings.load(), row), "sealed_url": ""})
    op.drop_column("webhook_endpoints", "sealed_url")


def _told() -> str:
    text: str = importlib.import_module("resources.database.migrations.versions.0013_audit_and_ledger").TOLD
    return text.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")


def _rewrite(changed: Callable[[Row], Row]) -> None:
    """Set the columns of every row to what `changed` returns; the audit log has no line of it."""
    conn = op.get_bind()
    conn.execute(sa.text("ALTER TABLE webhook_endpoints DISABLE TRIGGER webhook_endpoints_audited"))
    for row in conn.execute(sa.text("SELECT id, url, sealed_url, secrets FROM webhook_endpoints")).mappings().all():
        values = changed(dict(row))
        conn.execute(
            sa.text("UPDATE webhook_endpoints SET url = :url, sealed_url = :sealed_url, secrets = CAST(:secrets AS jsonb) WHERE id = :id"),
            {"id": row["id"], "url": values["url"], "sealed_url": values["sealed_url"], "secrets": json.dumps(values["secrets"])},
        )
    conn.execute(sa.text("ALTER TABLE webhook_endpoints ENABLE TRIGGER webhook_endpoints_audited"))
