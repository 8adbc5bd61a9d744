"""The database writes the audit log, keeps the ledger's sides equal, and lets nobody change either.

Revision ID: 0013
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

AUDITED = {
    "tenants": ("tenant", "name tier max_jobs_in_flight soft_gpu_hours hard_gpu_hours requests_per_minute suspended_at suspended_reason"),
    "members": ("member", "email name role notify removed_at"),
    "api_keys": ("api_key", "name hint scopes member_id names_owners requests_per_minute expires_at revoked_at"),
    "operator_keys": ("operator_key", "name hint expires_at revoked_at"),
    "files": ("file", "filename purpose bytes sha256 dataset_id deleted_at"),
    "uploads": ("upload", "filename bytes status file_id"),
    "datasets": ("dataset", "name version content_sha256 review approved_by cooled_at"),
    "eval_suites": ("eval_suite", "name num_items sha256"),
    "jobs": ("job", "state model method tier stop_requested reason"),
    "sweeps": ("sweep", "cancelled_at"),
    "adapters": ("adapter", "name stage approval approved_by approval_note eval_passed"),
    "deployments": ("deployment", "name desired"),
    "model_routes": ("model_route", "name targets"),
    "evaluations": ("evaluation", "adapter_id kind outcome"),
    "exports": ("export", "adapter_id format precision"),
    "checkpoint_permissions": ("checkpoint_permission", "checkpoint_id project_id"),
    "webhook_endpoints": ("webhook_endpoint", "name url secrets event_types state disabled_reason deleted_at"),
    "budgets": ("budget", "name limit_micros thresholds"),
    "refund_cases": ("refund_case", "amount_micros state decided_by note"),
    "ledger_entries": ("ledger_entry", "kind job_id attempt amount_micros detail"),
    "invoices": ("invoice", "month total_micros sha256"),
    "deletion_requests": ("deletion", "subject_kind subject_id reason done_at"),
}
"""By table: what its rows are called, and the columns whose changes are kept: no secret, but what ``ft_told`` makes of one."""
ID_OF = {"deployments": "adapter_id", "model_routes": "name"}
ONLY_OF_CALLERS = ("jobs", "ledger_entries")
"""What the platform itself does to a job is in the job's events, many to a job, and what it bills is the ledger; here is what somebody
asked for."""
CALLED = "coalesce(current_setting('ft.actor', true), '') <> ''"
APPEND_ONLY = ("ledger_entries", "ledger_postings", "invoices", "invoice_entries", "meter_events")
REDACTION = (
    "NEW.redacted_at IS NOT NULL AND NEW.changes = '{}' AND NEW.ip IS NULL AND NEW.user_agent IS NULL AND "
    "(NEW.seq, NEW.tenant_id, NEW.actor_kind, NEW.actor_id, NEW.action, NEW.object_type, NEW.object_id, NEW.request_id, NEW.created_at) "
    "IS NOT DISTINCT FROM "
    "(OLD.seq, OLD.tenant_id, OLD.actor_kind, OLD.actor_id, OLD.action, OLD.object_type, OLD.object_id, OLD.request_id, OLD.created_at)"
)
"""The one change of a line of the audit log: what it quotes of a tenant's data is taken out when that data is deleted."""


def upgrade() -> None:
    op.execute(TOLD)
    op.execute(AUDIT)
    op.execute(AUDIT_REPLAYS)
    op.execute(ONLY_ADDED)
    op.execute(BALANCED)
    for table, (noun, columns) in AUDITED.items():
        arguments = ", ".join(f"'{a}'" for a in (noun, ID_OF.get(table, "id"), *columns.split()))
        when = f"WHEN ({CALLED})" if table in ONLY_OF_CALLERS else ""
        op.execute(
            f"CREATE TRIGGER {table}_audited AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW {when} "
            f"EXECUTE FUNCTION ft_audit({arguments})"
        )
    op.execute(
        "CREATE TRIGGER deliveries_replays_audited AFTER UPDATE ON deliveries REFERENCING NEW TABLE AS changed "
        f"FOR EACH STATEMENT WHEN ({CALLED}) EXECUTE FUNCTION ft_audit_replays()"
    )
    for table in APPEND_ONLY:
        op.execute(f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} EXECUTE FUNCTION ft_only_added()")
    op.execute("CREATE TRIGGER audit_log_kept BEFORE DELETE OR TRUNCATE ON audit_log EXECUTE FUNCTION ft_only_added()")
    op.execute(
        f"CREATE TRIGGER audit_log_frozen BEFORE UPDATE ON audit_log FOR EACH ROW WHEN (NOT ({REDACTION})) EXECUTE FUNCTION ft_only_added()"
    )
    for table, column in (("ledger_entries", "id"), ("ledger_postings", "entry_id")):
        op.execute(
            f"CREATE CONSTRAINT TRIGGER {table}_balanced AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            f"EXECUTE FUNCTION ft_balanced('{column}')"
        )


def downgrade() -> None:
    for table in ("ledger_entries", "ledger_postings"):
        op.execute(f"DROP TRIGGER {table}_balanced ON {table}")
    for table in APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
    for name in ("kept", "frozen"):
        op.execute(f"DROP TRIGGER audit_log_{name} ON audit_log")
    for table in AUDITED:
        op.execute(f"DROP TRIGGER {table}_audited ON {table}")
    op.execute("DROP TRIGGER deliveries_replays_audited ON deliveries")
    for function in ("ft_balanced()", "ft_only_added()", "ft_audit_replays()", "ft_audit()", "ft_told(text, jsonb)"):
        op.execute(f"DROP FUNCTION {function}")


TOLD = """
CREATE FUNCTION ft_told(of text, entry jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    mark text;
    secret text;
BEGIN
    IF of <> 'webhook_endpoints' OR entry = '{}' THEN
        RETURN entry;
    END IF;
    FOREACH secret IN ARRAY ARRAY['url', 'secrets'] LOOP
        mark := 'sha256:' || left(encode(sha256(convert_to((entry ->> 'id') || ' ' || (entry ->> secret), 'UTF8')), 'hex'), 12);
        entry := jsonb_set(entry, ARRAY[secret], CASE
            WHEN entry ->> secret IN ('', '[]') THEN 'null'::jsonb
            WHEN secret = 'url' THEN to_jsonb(concat(substring(entry ->> 'url' FROM '^([a-zA-Z]+://)'),
                substring(entry ->> 'url' FROM '^[a-zA-Z]+://(?:[^/?#]*@)?([^/?#@]*)'), ' ', mark))
            ELSE to_jsonb(mark) END);
    END LOOP;
    RETURN entry;
END $$
"""
"""A row as the log may quote it: of a webhook endpoint scheme, host and port of the URL, whose rest often is a password, and of either a
short digest, which tells that it changed."""

AUDIT = """
CREATE FUNCTION ft_audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    old_row jsonb := ft_told(TG_TABLE_NAME, CASE WHEN TG_OP = 'INSERT' THEN '{}'::jsonb ELSE to_jsonb(OLD) END);
    new_row jsonb := ft_told(TG_TABLE_NAME, CASE WHEN TG_OP = 'DELETE' THEN '{}'::jsonb ELSE to_jsonb(NEW) END);
    either jsonb := old_row || new_row;
    actor jsonb := coalesce(nullif(current_setting('ft.actor', true), ''), '{}')::jsonb;
    changed jsonb;
BEGIN
    SELECT jsonb_object_agg(c, jsonb_build_array(old_row -> c, new_row -> c)) INTO changed
    FROM unnest(TG_ARGV[2:]) c WHERE coalesce(old_row -> c, 'null') IS DISTINCT FROM coalesce(new_row -> c, 'null');
    IF changed IS NULL AND TG_OP = 'UPDATE' THEN
        RETURN NULL;
    END IF;
    INSERT INTO audit_log (tenant_id, actor_kind, actor_id, action, object_type, object_id, changes, ip, user_agent, request_id, created_at)
    VALUES (
        CASE TG_TABLE_NAME WHEN 'tenants' THEN either ->> 'id'
            WHEN 'deployments' THEN (SELECT tenant_id FROM adapters WHERE id = either ->> 'adapter_id')
            ELSE either ->> 'tenant_id' END,
        coalesce(actor ->> 'kind', 'system'), coalesce(actor ->> 'id', current_setting('application_name')),
        TG_ARGV[0] || CASE TG_OP WHEN 'INSERT' THEN '.created' WHEN 'UPDATE' THEN '.updated' ELSE '.deleted' END,
        TG_ARGV[0], either ->> TG_ARGV[1], coalesce(changed, '{}'), actor ->> 'ip', actor ->> 'user_agent', actor ->> 'request_id',
        clock_timestamp());
    RETURN NULL;
END $$
"""

AUDIT_REPLAYS = """
CREATE FUNCTION ft_audit_replays() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    actor jsonb := current_setting('ft.actor', true)::jsonb;
BEGIN
    INSERT INTO audit_log (tenant_id, actor_kind, actor_id, action, object_type, object_id, changes, ip, user_agent, request_id, created_at)
    SELECT tenant_id, actor ->> 'kind', actor ->> 'id', 'webhook_endpoint.replayed', 'webhook_endpoint', target,
        jsonb_build_object('count', jsonb_build_array(NULL, count(*)),
            'deliveries', jsonb_build_array(NULL, to_jsonb((array_agg(id ORDER BY created_at, id))[1:20]))),
        actor ->> 'ip', actor ->> 'user_agent', actor ->> 'request_id', clock_timestamp()
    FROM changed WHERE state = 'pending' GROUP BY tenant_id, target;
    RETURN NULL;
END $$
"""
"""A line of each call, not of each of the 10,000 deliveries that it may send again; the first of them are named."""

ONLY_ADDED = """
CREATE FUNCTION ft_only_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows are only ever added to', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME;
END $$
"""

BALANCED = """
CREATE FUNCTION ft_balanced() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    entry text := to_jsonb(NEW) ->> TG_ARGV[0];
    total numeric;
    sides int;
    owed bigint;
    billed bigint;
BEGIN
    SELECT coalesce(sum(amount_micros), 0), count(*), coalesce(sum(amount_micros) FILTER (WHERE account LIKE 'receivable/%'), 0)
    INTO total, sides, owed FROM ledger_postings WHERE entry_id = entry;
    SELECT amount_micros INTO billed FROM ledger_entries WHERE id = entry;
    IF total <> 0 OR sides < 2 OR owed <> billed THEN
        RAISE EXCEPTION 'entry % does not balance: % postings add up to %, % of % micros are receivable', entry, sides, total, owed, billed
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'ledger_balanced', TABLE = 'ledger_entries';
    END IF;
    RETURN NULL;
END $$
"""
