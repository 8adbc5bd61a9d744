-- What the database itself enforces, whoever writes to it: lineage, append-only bookkeeping, the audit log, and the queue's notifications.

-- Lineage: an adapter's record is complete, agrees with its job and never changes; its stage moves only as adapter_stage_moves says.

INSERT INTO adapter_stage_moves (from_stage, to_stage) VALUES
    ('draft', 'staging'), ('draft', 'production'), ('draft', 'quarantined'), ('draft', 'deprecated'), ('draft', 'archived'),
    ('staging', 'production'), ('staging', 'quarantined'), ('staging', 'deprecated'), ('staging', 'archived'),
    ('production', 'staging'), ('production', 'deprecated'),
    ('quarantined', 'archived'),
    ('deprecated', 'production'), ('deprecated', 'archived');

CREATE FUNCTION ft_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: it is part of a lineage that never changes', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_ARGV[0], TABLE = TG_TABLE_NAME;
END $$;

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
END $$;

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
        CASE WHEN jsonb_array_length(j.spec -> 'sources') > 0 AND NEW.dataset_ids IS DISTINCT FROM
            (SELECT jsonb_agg(s.value -> 'dataset_id' ORDER BY s.ordinality)
                FROM jsonb_array_elements(j.spec -> 'sources') WITH ORDINALITY s) THEN 'dataset_ids' END,
        CASE WHEN EXISTS (SELECT FROM jsonb_array_elements_text(NEW.dataset_ids) i
            WHERE NOT EXISTS (SELECT FROM datasets d WHERE d.tenant_id = NEW.tenant_id AND d.id = i)) THEN 'dataset_ids' END,
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
END $$;

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
END $$;

CREATE FUNCTION ft_job_is_recorded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.tenant_id, NEW.method, NEW.training_file, NEW.validation_file, NEW.base_digest, NEW.dataset_id, NEW.pack_fingerprint,
        NEW.spec_sha256, NEW.spec, NEW.request -> 'training_files')
        IS DISTINCT FROM (OLD.tenant_id, OLD.method, OLD.training_file, OLD.validation_file, OLD.base_digest, OLD.dataset_id,
        OLD.pack_fingerprint, OLD.spec_sha256, OLD.spec, OLD.request -> 'training_files')
        AND EXISTS (SELECT FROM adapters WHERE job_id = OLD.id) THEN
        RAISE EXCEPTION 'job % has a registered adapter; what it was trained from never changes', OLD.id
            USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER adapter_stage_moves_kept BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON adapter_stage_moves
    EXECUTE FUNCTION ft_refuse('adapter_stage_moves_kept');
CREATE TRIGGER adapters_enter BEFORE INSERT ON adapters FOR EACH ROW EXECUTE FUNCTION ft_adapter_enters();
CREATE TRIGGER adapters_kept BEFORE DELETE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_refuse('adapters_kept');
CREATE TRIGGER adapters_not_truncated BEFORE TRUNCATE ON adapters EXECUTE FUNCTION ft_refuse('adapters_not_truncated');
CREATE TRIGGER adapters_record_frozen BEFORE UPDATE ON adapters FOR EACH ROW EXECUTE FUNCTION ft_frozen(
    'stage', 'promoted_at', 'deprecated_at', 'archived_at', 'approval', 'approved_by', 'approved_at', 'approval_note');
CREATE TRIGGER adapters_stage_moves BEFORE UPDATE ON adapters FOR EACH ROW
    WHEN (OLD.stage <> NEW.stage OR OLD.approval <> NEW.approval)
    EXECUTE FUNCTION ft_adapter_moves();
CREATE TRIGGER datasets_content_frozen BEFORE UPDATE ON datasets FOR EACH ROW
    WHEN ((OLD.tenant_id, OLD.id, OLD.version, OLD.format, OLD.content_sha256, OLD.row_count, OLD.uri, OLD.created_at)
        IS DISTINCT FROM (NEW.tenant_id, NEW.id, NEW.version, NEW.format, NEW.content_sha256, NEW.row_count, NEW.uri, NEW.created_at))
    EXECUTE FUNCTION ft_refuse('datasets_content_frozen');
CREATE TRIGGER datasets_kept BEFORE DELETE OR TRUNCATE ON datasets EXECUTE FUNCTION ft_refuse('datasets_kept');
CREATE TRIGGER deletions_append_only BEFORE UPDATE OR DELETE ON deletions FOR EACH ROW EXECUTE FUNCTION ft_refuse('deletions_append_only');
CREATE TRIGGER deletions_not_truncated BEFORE TRUNCATE ON deletions EXECUTE FUNCTION ft_refuse('deletions_not_truncated');
CREATE TRIGGER evaluations_finished_frozen BEFORE UPDATE ON evaluations FOR EACH ROW
    WHEN (OLD.state = 'succeeded')
    EXECUTE FUNCTION ft_refuse('evaluations_finished_frozen');
CREATE TRIGGER evaluations_finished_kept BEFORE DELETE ON evaluations FOR EACH ROW
    WHEN (OLD.finished_at IS NOT NULL)
    EXECUTE FUNCTION ft_refuse('evaluations_finished_kept');
CREATE TRIGGER evaluations_not_truncated BEFORE TRUNCATE ON evaluations EXECUTE FUNCTION ft_refuse('evaluations_not_truncated');
CREATE TRIGGER files_dataset_frozen BEFORE UPDATE OF dataset_id ON files FOR EACH ROW
    WHEN (OLD.dataset_id IS DISTINCT FROM NEW.dataset_id AND OLD.dataset_id IS NOT NULL)
    EXECUTE FUNCTION ft_refuse('files_dataset_frozen');
CREATE TRIGGER files_sha256_frozen BEFORE UPDATE OF sha256 ON files FOR EACH ROW
    WHEN (OLD.sha256 <> '' AND OLD.sha256 <> NEW.sha256)
    EXECUTE FUNCTION ft_refuse('files_sha256_frozen');
CREATE TRIGGER jobs_recorded_frozen BEFORE UPDATE OF
    tenant_id, method, training_file, validation_file, base_digest, dataset_id, pack_fingerprint, spec_sha256, spec, request ON jobs
    FOR EACH ROW EXECUTE FUNCTION ft_job_is_recorded();

-- Bookkeeping: rows are added, never changed; each entry of the ledger balances when its transaction commits.

CREATE FUNCTION ft_only_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows are only ever added to', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME;
END $$;

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
END $$;

CREATE TRIGGER audit_log_frozen BEFORE UPDATE ON audit_log FOR EACH ROW
    WHEN (NOT (NEW.redacted_at IS NOT NULL AND NEW.changes = '{}' AND NEW.ip IS NULL AND NEW.user_agent IS NULL
        AND (NEW.seq, NEW.tenant_id, NEW.actor_kind, NEW.actor_id, NEW.action)
            IS NOT DISTINCT FROM (OLD.seq, OLD.tenant_id, OLD.actor_kind, OLD.actor_id, OLD.action)
        AND (NEW.object_type, NEW.object_id, NEW.request_id, NEW.created_at)
            IS NOT DISTINCT FROM (OLD.object_type, OLD.object_id, OLD.request_id, OLD.created_at)))
    EXECUTE FUNCTION ft_only_added();
CREATE TRIGGER audit_log_kept BEFORE DELETE OR TRUNCATE ON audit_log EXECUTE FUNCTION ft_only_added();
CREATE TRIGGER invoice_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON invoice_entries EXECUTE FUNCTION ft_only_added();
CREATE TRIGGER invoices_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON invoices EXECUTE FUNCTION ft_only_added();
CREATE TRIGGER ledger_entries_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_entries EXECUTE FUNCTION ft_only_added();
CREATE CONSTRAINT TRIGGER ledger_entries_balanced AFTER INSERT ON ledger_entries DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION ft_balanced('id');
CREATE TRIGGER ledger_postings_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_postings EXECUTE FUNCTION ft_only_added();
CREATE CONSTRAINT TRIGGER ledger_postings_balanced AFTER INSERT ON ledger_postings DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION ft_balanced('entry_id');
CREATE TRIGGER meter_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON meter_events EXECUTE FUNCTION ft_only_added();

-- The audit log: who changed which object, and how. URLs and secrets of webhooks appear as a hash.

CREATE FUNCTION ft_told(of text, entry jsonb) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    mark text;
    secret text;
BEGIN
    IF of <> 'webhook_endpoints' OR entry = '{}' THEN
        RETURN entry;
    END IF;
    FOREACH secret IN ARRAY ARRAY['url', 'secrets'] LOOP
        mark := 'sha256:' || left(encode(sha256(convert_to((entry ->> 'id') || ' '
            || (entry ->> CASE secret WHEN 'url' THEN 'sealed_url' ELSE secret END), 'UTF8')), 'hex'), 12);
        entry := jsonb_set(entry, ARRAY[secret], CASE
            WHEN entry ->> secret IN ('', '[]') THEN 'null'::jsonb
            WHEN secret = 'url' THEN to_jsonb(concat(substring(entry ->> 'url' FROM '^([a-zA-Z]+://)'),
                substring(entry ->> 'url' FROM '^[a-zA-Z]+://(?:[^/?#]*@)?([^/?#@]*)'), ' ', mark))
            ELSE to_jsonb(mark) END);
    END LOOP;
    RETURN entry;
END $$;

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
END $$;

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
END $$;

CREATE TRIGGER adapters_audited AFTER INSERT OR UPDATE OR DELETE ON adapters FOR EACH ROW
    EXECUTE FUNCTION ft_audit('adapter', 'id', 'name', 'stage', 'approval', 'approved_by', 'approval_note', 'eval_passed');
CREATE TRIGGER api_keys_audited AFTER INSERT OR UPDATE OR DELETE ON api_keys FOR EACH ROW
    EXECUTE FUNCTION ft_audit('api_key', 'id', 'name', 'hint', 'scopes', 'member_id', 'names_owners', 'requests_per_minute',
        'expires_at', 'revoked_at');
CREATE TRIGGER budgets_audited AFTER INSERT OR UPDATE OR DELETE ON budgets FOR EACH ROW
    EXECUTE FUNCTION ft_audit('budget', 'id', 'name', 'limit_micros', 'thresholds');
CREATE TRIGGER checkpoint_permissions_audited AFTER INSERT OR UPDATE OR DELETE ON checkpoint_permissions FOR EACH ROW
    EXECUTE FUNCTION ft_audit('checkpoint_permission', 'id', 'checkpoint_id', 'project_id');
CREATE TRIGGER datasets_audited AFTER INSERT OR UPDATE OR DELETE ON datasets FOR EACH ROW
    EXECUTE FUNCTION ft_audit('dataset', 'id', 'name', 'version', 'content_sha256', 'review', 'approved_by', 'cooled_at');
CREATE TRIGGER deletion_requests_audited AFTER INSERT OR UPDATE OR DELETE ON deletion_requests FOR EACH ROW
    EXECUTE FUNCTION ft_audit('deletion', 'id', 'subject_kind', 'subject_id', 'reason', 'done_at');
CREATE TRIGGER deliveries_replays_audited AFTER UPDATE ON deliveries REFERENCING NEW TABLE AS changed
    WHEN (coalesce(current_setting('ft.actor', true), '') <> '')
    EXECUTE FUNCTION ft_audit_replays();
CREATE TRIGGER deployments_audited AFTER INSERT OR UPDATE OR DELETE ON deployments FOR EACH ROW
    EXECUTE FUNCTION ft_audit('deployment', 'adapter_id', 'name', 'desired');
CREATE TRIGGER eval_suites_audited AFTER INSERT OR UPDATE OR DELETE ON eval_suites FOR EACH ROW
    EXECUTE FUNCTION ft_audit('eval_suite', 'id', 'name', 'num_items', 'sha256');
CREATE TRIGGER evaluations_audited AFTER INSERT OR UPDATE OR DELETE ON evaluations FOR EACH ROW
    EXECUTE FUNCTION ft_audit('evaluation', 'id', 'adapter_id', 'kind', 'outcome');
CREATE TRIGGER exports_audited AFTER INSERT OR UPDATE OR DELETE ON exports FOR EACH ROW
    EXECUTE FUNCTION ft_audit('export', 'id', 'adapter_id', 'format', 'precision');
CREATE TRIGGER files_audited AFTER INSERT OR UPDATE OR DELETE ON files FOR EACH ROW
    EXECUTE FUNCTION ft_audit('file', 'id', 'filename', 'purpose', 'bytes', 'sha256', 'dataset_id', 'deleted_at');
CREATE TRIGGER invoices_audited AFTER INSERT OR UPDATE OR DELETE ON invoices FOR EACH ROW
    EXECUTE FUNCTION ft_audit('invoice', 'id', 'month', 'total_micros', 'sha256');
CREATE TRIGGER jobs_audited AFTER INSERT OR UPDATE OR DELETE ON jobs FOR EACH ROW
    WHEN (coalesce(current_setting('ft.actor', true), '') <> '')
    EXECUTE FUNCTION ft_audit('job', 'id', 'state', 'model', 'method', 'tier', 'stop_requested', 'reason');
CREATE TRIGGER ledger_entries_audited AFTER INSERT OR UPDATE OR DELETE ON ledger_entries FOR EACH ROW
    WHEN (coalesce(current_setting('ft.actor', true), '') <> '')
    EXECUTE FUNCTION ft_audit('ledger_entry', 'id', 'kind', 'job_id', 'attempt', 'amount_micros', 'detail');
CREATE TRIGGER maintenance_audited AFTER INSERT OR UPDATE OR DELETE ON maintenance FOR EACH ROW
    EXECUTE FUNCTION ft_audit('maintenance', 'scope', 'message', 'stop_at');
CREATE TRIGGER members_audited AFTER INSERT OR UPDATE OR DELETE ON members FOR EACH ROW
    EXECUTE FUNCTION ft_audit('member', 'id', 'email', 'name', 'role', 'notify', 'removed_at');
CREATE TRIGGER model_routes_audited AFTER INSERT OR UPDATE OR DELETE ON model_routes FOR EACH ROW
    EXECUTE FUNCTION ft_audit('model_route', 'name', 'name', 'targets');
CREATE TRIGGER node_drains_audited AFTER INSERT OR UPDATE OR DELETE ON node_drains FOR EACH ROW
    EXECUTE FUNCTION ft_audit('node_drain', 'node', 'reason');
CREATE TRIGGER operator_keys_audited AFTER INSERT OR UPDATE OR DELETE ON operator_keys FOR EACH ROW
    EXECUTE FUNCTION ft_audit('operator_key', 'id', 'name', 'hint', 'expires_at', 'revoked_at');
CREATE TRIGGER recipes_audited AFTER INSERT OR UPDATE OR DELETE ON recipes FOR EACH ROW
    EXECUTE FUNCTION ft_audit('recipe', 'name', 'version', 'retired_at');
CREATE TRIGGER refund_cases_audited AFTER INSERT OR UPDATE OR DELETE ON refund_cases FOR EACH ROW
    EXECUTE FUNCTION ft_audit('refund_case', 'id', 'amount_micros', 'state', 'decided_by', 'note');
CREATE TRIGGER sweeps_audited AFTER INSERT OR UPDATE OR DELETE ON sweeps FOR EACH ROW
    EXECUTE FUNCTION ft_audit('sweep', 'id', 'cancelled_at');
CREATE TRIGGER tenants_audited AFTER INSERT OR UPDATE OR DELETE ON tenants FOR EACH ROW
    EXECUTE FUNCTION ft_audit('tenant', 'id', 'name', 'tier', 'max_jobs_in_flight', 'soft_gpu_hours', 'hard_gpu_hours',
        'requests_per_minute', 'suspended_at', 'suspended_reason');
CREATE TRIGGER uploads_audited AFTER INSERT OR UPDATE OR DELETE ON uploads FOR EACH ROW
    EXECUTE FUNCTION ft_audit('upload', 'id', 'filename', 'bytes', 'status', 'file_id');
CREATE TRIGGER integrations_audited AFTER INSERT OR UPDATE OR DELETE ON integrations FOR EACH ROW
    EXECUTE FUNCTION ft_audit('integration', 'type', 'hint', 'updated_at');
CREATE TRIGGER webhook_endpoints_audited AFTER INSERT OR UPDATE OR DELETE ON webhook_endpoints FOR EACH ROW
    EXECUTE FUNCTION ft_audit('webhook_endpoint', 'id', 'name', 'url', 'secrets', 'event_types', 'state', 'disabled_reason', 'deleted_at');

-- A GPU is held by one reservation at most: a second one that names it is refused, whatever the scheduler computed.

CREATE FUNCTION ft_hold_devices() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM held_devices WHERE job_id = NEW.job_id AND attempt = NEW.attempt;
    IF NEW.released_at IS NULL THEN
        INSERT INTO held_devices (node, number, job_id, attempt)
        SELECT NEW.placement -> (position - 1)::int ->> 0, number::int, NEW.job_id, NEW.attempt
        FROM jsonb_array_elements(NEW.devices) WITH ORDINALITY AS on_node (numbers, position), jsonb_array_elements_text(numbers) AS number;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER reservations_hold AFTER INSERT OR UPDATE OF released_at, placement, devices ON reservations FOR EACH ROW
    EXECUTE FUNCTION ft_hold_devices();

-- The queue: whoever listens on the channel ft_queue hears that jobs, reservations or evaluations changed.

CREATE FUNCTION ft_queue_changed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_notify('ft_queue', ''); RETURN NULL; END $$;

CREATE TRIGGER jobs_told AFTER INSERT OR UPDATE OF state, prepare_runs, train_runs, evaluate_runs ON jobs
    EXECUTE FUNCTION ft_queue_changed();
CREATE TRIGGER reservations_told AFTER INSERT OR UPDATE OF released_at ON reservations EXECUTE FUNCTION ft_queue_changed();
CREATE TRIGGER evaluations_told AFTER INSERT OR UPDATE OF state, runs ON evaluations EXECUTE FUNCTION ft_queue_changed();
