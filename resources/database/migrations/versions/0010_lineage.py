"""The database itself enforces lineage: what an adapter's record must hold, that it never changes, how its stage moves.

Also what deletions leave behind, and the state of mirrors. A row of before that breaks a rule stays, is named in a warning,
and leads nowhere but out of service: it can be deprecated and archived.

Revision ID: 0010
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

DIGESTS = ("base_digest", "spec_sha256", "lock_sha256", "manifest_sha256")
TEXTS = ("name", "base_model", "dataset_id", "pack_fingerprint", "commit", "eval_report_key", "object_prefix")
MOVES = {
    "draft": ("staging", "production", "quarantined", "deprecated", "archived"),
    "staging": ("production", "quarantined", "deprecated", "archived"),
    "production": ("staging", "deprecated"),
    "quarantined": ("archived",),
    "deprecated": ("production", "archived"),
}
STAGES = "'draft', 'staging', 'production', 'quarantined', 'deprecated', 'archived'"
ALWAYS = {
    "stage_known": f"stage IN ({STAGES})",
    "deprecated_dated": "stage <> 'deprecated' OR deprecated_at IS NOT NULL",
    "archived_dated": "stage <> 'archived' OR archived_at IS NOT NULL",
    "approval_known": "approval IN ('none', 'pending', 'approved', 'rejected')",
    "approval_signed": "approval NOT IN ('approved', 'rejected') OR (approved_by IS NOT NULL AND approved_at IS NOT NULL)",
}
UNLESS_WITHDRAWN = {
    **{f"{name}_sha256_format" if not name.endswith("sha256") else f"{name}_format": f"{name} ~ '^[0-9a-f]{{64}}$'" for name in DIGESTS},
    **{f"{name}_present": f"\"{name}\" <> ''" for name in TEXTS},
    "type_known": "type IN ('lora_adapter', 'full_model')",
    "rank_and_alpha_present": "type = 'full_model' OR (rank IS NOT NULL AND rank > 0 AND alpha IS NOT NULL)",
    "served_passed_gate": "stage NOT IN ('staging', 'production') OR eval_passed",
    "production_promoted": "stage <> 'production' OR promoted_at IS NOT NULL",
    "production_approved": "stage <> 'production' OR approval IN ('none', 'approved')",
}
CHECKS = ALWAYS | {name: f"stage IN ('deprecated', 'archived') OR ({rule})" for name, rule in UNLESS_WITHDRAWN.items()}
MUTABLE = ("stage", "promoted_at", "deprecated_at", "archived_at", "approval", "approved_by", "approved_at", "approval_note")
DATASET_CONTENT = ("tenant_id", "id", "version", "format", "content_sha256", "row_count", "uri", "created_at")
JOB_LINKS = (
    "tenant_id", "method", "training_file", "validation_file", "base_digest", "dataset_id", "pack_fingerprint", "spec_sha256", "spec",
)  # fmt: skip
FUNCTIONS = (
    "ft_refuse", "ft_frozen", "ft_adapter_enters", "ft_adapter_moves", "ft_job_is_recorded",
)  # fmt: skip
TRIGGERS = (
    ("adapters", "adapters_enter"),
    ("adapters", "adapters_record_frozen"),
    ("adapters", "adapters_stage_moves"),
    ("adapters", "adapters_kept"),
    ("adapters", "adapters_not_truncated"),
    ("datasets", "datasets_content_frozen"),
    ("datasets", "datasets_kept"),
    ("files", "files_sha256_frozen"),
    ("files", "files_dataset_frozen"),
    ("jobs", "jobs_recorded_frozen"),
    ("deletions", "deletions_append_only"),
    ("deletions", "deletions_not_truncated"),
    ("evaluations", "evaluations_finished_frozen"),
    ("evaluations", "evaluations_finished_kept"),
    ("evaluations", "evaluations_not_truncated"),
    ("adapter_stage_moves", "adapter_stage_moves_kept"),
)


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    _tables()
    _repair()
    _constraints()
    for statement in (REFUSE, FROZEN, ENTERS, JOB_IS_RECORDED, STAGE_MOVES):
        op.execute(statement)
    _triggers()


def downgrade() -> None:
    for table, name in TRIGGERS:
        op.execute(f"DROP TRIGGER {name} ON {table}")
    for name in FUNCTIONS:
        op.execute(f"DROP FUNCTION {name}()")
    for name in CHECKS:
        op.drop_constraint(op.f(f"ck_adapters_{name}"), "adapters", type_="check")
    for name in ("tenant_id_dataset_id", "parent_adapter_id", "parent_checkpoint_id"):
        op.drop_constraint(op.f(f"fk_adapters_{name}"), "adapters", type_="foreignkey")
    op.drop_index("ix_adapters_deprecated", "adapters")
    op.drop_index("ix_adapters_pending", "adapters")
    op.drop_index("ix_eval_scores_tenant_id", "eval_scores")
    op.drop_column("eval_scores", "tenant_id")
    op.drop_column("adapters", "approval_note")
    op.drop_column("deletions", "seq")
    for table in ("adapter_stage_moves", "deletion_objects", "deletion_requests", "mirrors"):
        op.drop_table(table)


def _tables() -> None:
    moves = op.create_table(
        "adapter_stage_moves",
        sa.Column("from_stage", sa.Text),
        sa.Column("to_stage", sa.Text),
        sa.PrimaryKeyConstraint("from_stage", "to_stage", name=op.f("pk_adapter_stage_moves")),
    )
    op.bulk_insert(moves, [{"from_stage": a, "to_stage": b} for a, targets in MOVES.items() for b in targets])
    op.add_column("adapters", sa.Column("approval_note", sa.Text))
    op.add_column("deletions", sa.Column("seq", sa.BigInteger, sa.Identity(), nullable=False))
    op.create_unique_constraint(op.f("uq_deletions_seq"), "deletions", ["seq"])
    op.add_column("eval_scores", sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", name=op.f("fk_eval_scores_tenant_id"))))
    op.create_index("ix_eval_scores_tenant_id", "eval_scores", ["tenant_id"])
    op.create_table(
        "deletion_requests",
        sa.Column("id", sa.Text),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id", name=op.f("fk_deletion_requests_tenant_id")), nullable=False),
        sa.Column("subject_kind", sa.Text, nullable=False),
        sa.Column("subject_id", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("requested_by", sa.Text, nullable=False),
        sa.Column("waiting_for", sa.Text),
        sa.Column("removed", JSONB, nullable=False, server_default="[]"),
        _time("requested_at"),
        _time("absent_at", nullable=True),
        _time("done_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deletion_requests")),
    )
    op.create_index("ix_deletion_requests_tenant_id", "deletion_requests", ["tenant_id"])
    is_open = sa.text("done_at IS NULL")
    op.create_index("uq_deletion_requests_open", "deletion_requests", ["subject_kind", "subject_id"], unique=True, postgresql_where=is_open)
    op.create_table(
        "deletion_objects",
        sa.Column("deletion_id", sa.Text, sa.ForeignKey("deletion_requests.id", name=op.f("fk_deletion_objects_deletion_id"))),
        sa.Column("object_key", sa.Text),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        _time("deleted_at", nullable=True),
        sa.PrimaryKeyConstraint("deletion_id", "object_key", "sha256", name=op.f("pk_deletion_objects")),
    )
    op.create_table(
        "mirrors",
        sa.Column("name", sa.Text),
        sa.Column("digest", sa.Text, nullable=False),
        _time("mirrored_at"),
        sa.Column("error", sa.Text),
        _time("failed_at", nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_mirrors")),
    )


def _repair() -> None:
    """Give rows of before the times that nobody wrote then; the grace of a deprecated adapter begins now."""
    op.execute("UPDATE adapters SET promoted_at = created_at WHERE stage = 'production' AND promoted_at IS NULL")
    op.execute("UPDATE adapters SET deprecated_at = now() WHERE stage = 'deprecated' AND deprecated_at IS NULL")
    op.execute("UPDATE adapters SET archived_at = now() WHERE stage = 'archived' AND archived_at IS NULL")


def _constraints() -> None:
    op.create_index("ix_adapters_pending", "adapters", ["tenant_id", "created_at"], postgresql_where=sa.text("approval = 'pending'"))
    op.create_index("ix_adapters_deprecated", "adapters", ["deprecated_at"], postgresql_where=sa.text("stage = 'deprecated'"))
    keys = {
        "tenant_id_dataset_id": "FOREIGN KEY (tenant_id, dataset_id) REFERENCES datasets (tenant_id, id)",
        "parent_adapter_id": "FOREIGN KEY (parent_adapter_id) REFERENCES adapters (id)",
        "parent_checkpoint_id": "FOREIGN KEY (parent_checkpoint_id) REFERENCES checkpoints (id)",
    }
    rules = {f"fk_adapters_{k}": rule for k, rule in keys.items()} | {f"ck_adapters_{k}": f"CHECK ({rule})" for k, rule in CHECKS.items()}
    for name, rule in rules.items():
        op.execute(f"ALTER TABLE adapters ADD CONSTRAINT {name} {rule} NOT VALID")
        op.execute(
            f"DO $$ BEGIN ALTER TABLE adapters VALIDATE CONSTRAINT {name}; "
            "EXCEPTION WHEN check_violation OR foreign_key_violation THEN "
            f"RAISE WARNING 'rows of before break {name}: %', SQLERRM; END $$"
        )


def _triggers() -> None:
    changed = " OR ".join(f"OLD.{c} IS DISTINCT FROM NEW.{c}" for c in DATASET_CONTENT)
    refused = {
        "adapters_kept": "BEFORE DELETE ON adapters FOR EACH ROW",
        "adapters_not_truncated": "BEFORE TRUNCATE ON adapters",
        "datasets_kept": "BEFORE DELETE OR TRUNCATE ON datasets",
        "deletions_append_only": "BEFORE UPDATE OR DELETE ON deletions FOR EACH ROW",
        "deletions_not_truncated": "BEFORE TRUNCATE ON deletions",
        "evaluations_finished_frozen": "BEFORE UPDATE ON evaluations FOR EACH ROW WHEN (OLD.state = 'succeeded')",
        "evaluations_finished_kept": "BEFORE DELETE ON evaluations FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL)",
        "evaluations_not_truncated": "BEFORE TRUNCATE ON evaluations",
        "adapter_stage_moves_kept": "BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON adapter_stage_moves",
        "files_sha256_frozen": "BEFORE UPDATE OF sha256 ON files FOR EACH ROW WHEN (OLD.sha256 <> '' AND OLD.sha256 <> NEW.sha256)",
        "files_dataset_frozen": "BEFORE UPDATE OF dataset_id ON files FOR EACH ROW WHEN (OLD.dataset_id IS DISTINCT FROM NEW.dataset_id "
        "AND OLD.dataset_id IS NOT NULL)",
        "datasets_content_frozen": f"BEFORE UPDATE ON datasets FOR EACH ROW WHEN ({changed})",
    }
    for name, when in refused.items():
        op.execute(f"CREATE TRIGGER {name} {when} EXECUTE FUNCTION ft_refuse('{name}')")
    mutable = ", ".join(f"'{c}'" for c in MUTABLE)
    links = ", ".join(JOB_LINKS)
    op.execute("CREATE TRIGGER adapters_enter BEFORE INSERT ON adapters FOR EACH ROW EXECUTE FUNCTION ft_adapter_enters()")
    op.execute(f"CREATE TRIGGER adapters_record_frozen BEFORE UPDATE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_frozen({mutable})")
    op.execute(
        "CREATE TRIGGER adapters_stage_moves BEFORE UPDATE ON adapters FOR EACH ROW "
        "WHEN (OLD.stage <> NEW.stage OR OLD.approval <> NEW.approval) EXECUTE FUNCTION ft_adapter_moves()"
    )
    op.execute(f"CREATE TRIGGER jobs_recorded_frozen BEFORE UPDATE OF {links} ON jobs FOR EACH ROW EXECUTE FUNCTION ft_job_is_recorded()")


REFUSE = """
CREATE FUNCTION ft_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: it is part of a lineage that never changes', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_ARGV[0], TABLE = TG_TABLE_NAME;
END $$
"""

FROZEN = """
CREATE FUNCTION ft_frozen() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    changed text;
BEGIN
    SELECT string_agg(o.key, ', ' ORDER BY o.key) INTO changed
    FROM jsonb_each(to_jsonb(OLD) - TG_ARGV::text[]) o JOIN jsonb_each(to_jsonb(NEW)) n ON n.key = o.key
    WHERE o.value IS DISTINCT FROM n.value;
    IF changed IS NOT NULL THEN
        RAISE EXCEPTION 'the record of % never changes: %', OLD.id, changed
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, COLUMN = changed;
    END IF;
    RETURN NEW;
END $$
"""

ENTERS = """
CREATE FUNCTION ft_adapter_enters() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    gaps text;
BEGIN
    IF NEW.stage NOT IN ('draft', 'quarantined') THEN
        RAISE EXCEPTION 'adapter % enters as draft or quarantined, not as %', NEW.id, NEW.stage
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'adapters_enter', COLUMN = 'stage';
    END IF;
    SELECT concat_ws(', ',
        CASE WHEN j.tenant_id IS DISTINCT FROM NEW.tenant_id THEN 'tenant_id' END,
        CASE WHEN j.base_digest IS DISTINCT FROM NEW.base_digest THEN 'base_digest' END,
        CASE WHEN j.dataset_id IS DISTINCT FROM NEW.dataset_id THEN 'dataset_id' END,
        CASE WHEN j.pack_fingerprint IS DISTINCT FROM NEW.pack_fingerprint THEN 'pack_fingerprint' END,
        CASE WHEN j.spec_sha256 IS DISTINCT FROM NEW.spec_sha256 OR j.spec IS NULL THEN 'spec_sha256' END,
        CASE WHEN NEW.approval <> CASE
            WHEN NEW.stage = 'draft' AND j.request #>> '{eval_config,approval}' = 'required' THEN 'pending' ELSE 'none' END
            THEN 'approval' END)
    INTO gaps FROM jobs j WHERE j.id = NEW.job_id;
    IF gaps <> '' THEN
        RAISE EXCEPTION 'adapter % disagrees with its job %: %', NEW.id, NEW.job_id, gaps
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'adapters_enter', COLUMN = gaps;
    END IF;
    RETURN NEW;
END $$
"""

JOB_IS_RECORDED = f"""
CREATE FUNCTION ft_job_is_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF ({", ".join(f"NEW.{c}" for c in JOB_LINKS)})
        IS DISTINCT FROM ({", ".join(f"OLD.{c}" for c in JOB_LINKS)})
        AND EXISTS (SELECT FROM adapters WHERE job_id = OLD.id) THEN
        RAISE EXCEPTION 'job % has a registered adapter; what it was trained from never changes', OLD.id
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$
"""

STAGE_MOVES = """
CREATE FUNCTION ft_adapter_moves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.stage <> NEW.stage
        AND NOT EXISTS (SELECT FROM adapter_stage_moves WHERE from_stage = OLD.stage AND to_stage = NEW.stage) THEN
        RAISE EXCEPTION 'adapter % is % and cannot become %', OLD.id, OLD.stage, NEW.stage
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, COLUMN = 'stage';
    END IF;
    IF OLD.approval <> NEW.approval AND NEW.approval = 'none' THEN
        RAISE EXCEPTION 'adapter % needs approval (%), and that is not taken back', OLD.id, OLD.approval
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, COLUMN = 'approval';
    END IF;
    RETURN NEW;
END $$
"""
