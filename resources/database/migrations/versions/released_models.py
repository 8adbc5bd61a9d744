"""A person can release a model that did not pass its gate.

Revision ID: released_models
"""

from alembic import op

from resources.database.migrations.versions.initial import allow_tenants

revision = "released_models"
down_revision = "agent_tokens"

WRITTEN_BY_TENANTS = {
    "adapters": ("", "release_reason released_at released_by", False),
    "jobs": ("", "error fine_tuned_model", False),
}
"""As in the first migration, and in addition to it."""

RELEASES = """
ALTER TABLE adapters ADD released_by text, ADD released_at timestamptz, ADD release_reason text,
    ADD CONSTRAINT ck_adapters_release_signed
        CHECK (released_at IS NULL = (released_by IS NULL) AND released_at IS NULL = (release_reason IS NULL)),
    DROP CONSTRAINT ck_adapters_served_passed_gate,
    ADD CONSTRAINT ck_adapters_served_passed_gate
        CHECK (stage IN ('quarantined', 'deprecated', 'archived') OR eval_passed OR released_at IS NOT NULL);
ALTER TABLE adapter_stage_moves DISABLE TRIGGER adapter_stage_moves_kept;
INSERT INTO adapter_stage_moves (from_stage, to_stage) VALUES ('quarantined', 'draft');
ALTER TABLE adapter_stage_moves ENABLE TRIGGER adapter_stage_moves_kept;
DROP TRIGGER adapters_record_frozen ON adapters;
CREATE TRIGGER adapters_record_frozen BEFORE UPDATE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_frozen(
    'stage', 'promoted_at', 'deprecated_at', 'archived_at', 'approval', 'approved_by', 'approved_at', 'approval_note',
    'signature', 'signing_key_id', 'released_by', 'released_at', 'release_reason');
DROP TRIGGER adapters_audited ON adapters;
CREATE TRIGGER adapters_audited AFTER INSERT OR UPDATE OR DELETE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_audit(
    'adapter', 'id', 'name', 'stage', 'approval', 'approved_by', 'approval_note', 'eval_passed', 'released_by', 'release_reason');

-- A quarantined adapter leaves its quarantine only with a release of that moment, also one that was released before.
CREATE FUNCTION ft_adapter_released() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.stage = 'draft' AND NEW.released_at IS NOT DISTINCT FROM OLD.released_at THEN
        RAISE EXCEPTION 'adapter % is quarantined and was not released', OLD.id
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ck_adapters_served_passed_gate', TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER adapters_released BEFORE UPDATE ON adapters FOR EACH ROW WHEN (OLD.stage = 'quarantined')
    EXECUTE FUNCTION ft_adapter_released();
"""


def upgrade() -> None:
    op.get_bind().connection.cursor().execute(RELEASES)
    allow_tenants(WRITTEN_BY_TENANTS)
