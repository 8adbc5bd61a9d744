"""Signed adapters and exports, exports that hold a device, and the audit log as a chain of hashes.

The worker gives the entries that are already in the audit log their places in the chain, the oldest first. Merged weights and GGUF files
that were ordered and are not ready have failed: they are ordered again, and then wait for a device.

Revision ID: signatures_and_audit_chain
"""

from alembic import op

from resources.database.migrations.versions.initial import allow_tenants

revision = "signatures_and_audit_chain"
down_revision = "initial_15"

WRITTEN_BY_TENANTS = {"exports": ("expected_s job_id", "created_at", False)}
"""As in the first migration, and in addition to it."""

SIGNATURES = """
CREATE TABLE signing_keys (
    id text NOT NULL,
    public_key text NOT NULL,
    created_at timestamptz NOT NULL,
    revoked_at timestamptz,
    CONSTRAINT pk_signing_keys PRIMARY KEY (id)
);
CREATE TRIGGER signing_keys_audited AFTER INSERT OR UPDATE OR DELETE ON signing_keys FOR EACH ROW
    EXECUTE FUNCTION ft_audit('signing_key', 'id', 'public_key', 'revoked_at');
GRANT SELECT, INSERT ON signing_keys TO ft_platform;  -- only operators revoke a key
GRANT UPDATE (revoked_at) ON signing_keys TO ft_operator;

ALTER TABLE adapters ADD signature jsonb, ADD signing_key_id text,
    ADD CONSTRAINT fk_adapters_signing_key_id FOREIGN KEY (signing_key_id) REFERENCES signing_keys(id);
CREATE INDEX ix_adapters_unsigned ON adapters (created_at) WHERE (signing_key_id IS NULL AND stage <> 'archived');
DROP TRIGGER adapters_record_frozen ON adapters;
CREATE TRIGGER adapters_record_frozen BEFORE UPDATE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_frozen(
    'stage', 'promoted_at', 'deprecated_at', 'archived_at', 'approval', 'approved_by', 'approved_at', 'approval_note',
    'signature', 'signing_key_id');
"""

EXPORTS = """
ALTER TABLE exports
    ADD job_id text, ADD expected_s double precision, ADD manifest_sha256 text, ADD signature jsonb, ADD signing_key_id text,
    ADD CONSTRAINT fk_exports_job_id FOREIGN KEY (job_id) REFERENCES jobs(id),
    ADD CONSTRAINT fk_exports_signing_key_id FOREIGN KEY (signing_key_id) REFERENCES signing_keys(id);
UPDATE exports SET job_id = a.job_id FROM adapters a WHERE a.id = exports.adapter_id;
UPDATE exports SET status = 'failed', progress = NULL, claim = NULL, finished_at = now(), error = jsonb_build_object(
        'code', 'export_failed', 'message', 'the platform was upgraded before the export was made; ask for it again', 'param', NULL)
    WHERE format IN ('merged', 'gguf') AND status IN ('queued', 'running');
ALTER TABLE exports ALTER job_id SET NOT NULL;
CREATE TRIGGER exports_told AFTER INSERT OR UPDATE OF status ON exports EXECUTE FUNCTION ft_queue_changed();
ALTER TABLE reservations ADD export_id text;
"""

AUDIT_CHAIN = """
ALTER TABLE audit_log ADD position bigint, ADD previous_sha256 text, ADD salt text, ADD content_sha256 text, ADD sha256 text,
    ADD CONSTRAINT uq_audit_log_position UNIQUE (position);
CREATE INDEX ix_audit_log_unplaced ON audit_log (seq) WHERE position IS NULL;
GRANT UPDATE (salt, position, previous_sha256, content_sha256, sha256) ON audit_log TO ft_platform;

-- An entry gets its place in the chain once, and is otherwise only ever erased: its values, address, user agent and their salt.
DROP TRIGGER audit_log_frozen ON audit_log;
CREATE TRIGGER audit_log_frozen BEFORE UPDATE ON audit_log FOR EACH ROW
    WHEN (NOT ((NEW.seq, NEW.tenant_id, NEW.actor_kind, NEW.actor_id, NEW.action)
            IS NOT DISTINCT FROM (OLD.seq, OLD.tenant_id, OLD.actor_kind, OLD.actor_id, OLD.action)
        AND (NEW.object_type, NEW.object_id, NEW.request_id, NEW.created_at)
            IS NOT DISTINCT FROM (OLD.object_type, OLD.object_id, OLD.request_id, OLD.created_at)
        AND ((NEW.redacted_at IS NOT NULL AND NEW.changes = '{}' AND NEW.ip IS NULL AND NEW.user_agent IS NULL AND NEW.salt IS NULL
                AND (NEW.position, NEW.previous_sha256, NEW.content_sha256, NEW.sha256)
                    IS NOT DISTINCT FROM (OLD.position, OLD.previous_sha256, OLD.content_sha256, OLD.sha256))
            OR (OLD.position IS NULL AND NEW.position IS NOT NULL AND NEW.content_sha256 IS NOT NULL AND NEW.sha256 IS NOT NULL
                AND (NEW.changes, NEW.ip, NEW.user_agent, NEW.redacted_at)
                    IS NOT DISTINCT FROM (OLD.changes, OLD.ip, OLD.user_agent, OLD.redacted_at)))))
    EXECUTE FUNCTION ft_only_added();
"""


def upgrade() -> None:
    cursor = op.get_bind().connection.cursor()
    for statements in (SIGNATURES, EXPORTS, AUDIT_CHAIN):
        cursor.execute(statements)
    allow_tenants(WRITTEN_BY_TENANTS)
