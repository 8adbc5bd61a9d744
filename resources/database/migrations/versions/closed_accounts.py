"""A deletion of all data can close the tenant's account.

Revision ID: closed_accounts
"""

from alembic import op

from resources.database.migrations.versions.initial import allow_tenants

revision = "closed_accounts"
down_revision = "scored_suites"

WRITTEN_BY_TENANTS = {"deletion_requests": ("closes_account", "closes_account", False)}
"""As in the first migration, and in addition to it."""

CLOSING = """
ALTER TABLE tenants ADD closed_at timestamptz;
ALTER TABLE deletion_requests ADD closes_account boolean NOT NULL DEFAULT false;
DROP TRIGGER deletion_requests_audited ON deletion_requests;
CREATE TRIGGER deletion_requests_audited AFTER INSERT OR UPDATE OR DELETE ON deletion_requests FOR EACH ROW
    EXECUTE FUNCTION ft_audit('deletion', 'id', 'subject_kind', 'subject_id', 'reason', 'done_at', 'closes_account');
DROP TRIGGER tenants_audited ON tenants;
CREATE TRIGGER tenants_audited AFTER INSERT OR UPDATE OR DELETE ON tenants FOR EACH ROW
    EXECUTE FUNCTION ft_audit('tenant', 'id', 'name', 'tier', 'max_jobs_in_flight', 'soft_gpu_hours', 'hard_gpu_hours',
        'requests_per_minute', 'suspended_at', 'suspended_reason', 'closed_at');
"""


def upgrade() -> None:
    op.get_bind().connection.cursor().execute(CLOSING)
    allow_tenants(WRITTEN_BY_TENANTS)
