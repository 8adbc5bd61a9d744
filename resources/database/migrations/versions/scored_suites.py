"""Tenants bring scored suites, in versions.

Revision ID: scored_suites
"""

from alembic import op

from resources.database.migrations.versions.initial import OWN, PLATFORM, allow_tenants, confine

revision = "scored_suites"
down_revision = "submitting_keys"

WRITTEN_BY_TENANTS = {
    "scored_suites": ("created_at grader id max_drop metric min_score name num_items object_key sha256 tenant_id version", "", True)
}
"""As in the first migration, and in addition to it."""

TABLE = """
CREATE TABLE scored_suites (
    id text NOT NULL,
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    metric text NOT NULL,
    grader jsonb,
    max_drop double precision NOT NULL,
    min_score double precision,
    num_items integer NOT NULL,
    sha256 text NOT NULL,
    object_key text NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT pk_scored_suites PRIMARY KEY (id),
    CONSTRAINT uq_scored_suites_tenant_id_name_version UNIQUE (tenant_id, name, version),
    CONSTRAINT fk_scored_suites_tenant_id FOREIGN KEY (tenant_id) REFERENCES tenants(id)
)
"""


def upgrade() -> None:
    op.execute(TABLE)
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON scored_suites TO {PLATFORM}")
    confine("scored_suites", OWN)
    allow_tenants(WRITTEN_BY_TENANTS)
