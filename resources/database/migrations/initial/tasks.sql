-- What the task queue (procrastinate, whose own schema is applied before this file, in the schema "tasks") needs in addition.

-- The library's functions find its tables from any session, so that an operator may cancel a task.
DO $$ DECLARE f regprocedure; BEGIN
    FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = 'tasks'::regnamespace LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = tasks, pg_temp', f);
    END LOOP;
END $$;

-- Finds the tasks of a lock; the fetch of a task looks for earlier ones of its lock.
CREATE INDEX waiting_by_lock ON tasks.procrastinate_jobs (lock, id) WHERE status IN ('todo', 'doing');

-- Adds a task in the caller's transaction. With `turn`, tasks of the same turn run one at a time, in order, and turns alternate: a turn's
-- first task goes before the second one of any other. With `once`, a task that already waits is kept, and runs by the earlier of both times;
-- it is locked until the caller commits, so that it cannot run before it sees the caller's changes.
CREATE FUNCTION tasks.defer(task text, queue text, args jsonb, turn text, once text, at timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = tasks, pg_temp AS $$
DECLARE
    place integer := 0;
    tenant text := current_setting('ft.tenant', true);
    own_turn text := queue || ':' || tenant;
BEGIN
    IF session_user = 'ft_tenant' AND (coalesce(at, now()) < now() + interval '10 minutes' AND CASE
        WHEN task = 'fan_out' THEN queue = 'quick' AND turn = 'fan_out' AND once IS NULL AND args = '{}'
        WHEN task = 'deliver' THEN turn = args ->> 'target' AND once = turn AND EXISTS
            (SELECT FROM public.webhook_endpoints e WHERE e.id = turn AND e.tenant_id = tenant)
        WHEN task IN ('validate', 'fetch', 'export') THEN args ->> 'tenant' = tenant AND coalesce(turn, own_turn) = own_turn AND once IS NULL
    END) IS NOT TRUE THEN
        RAISE EXCEPTION 'a tenant''s call may not add the task % of %', task, coalesce(turn, queue) USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF turn IS NOT NULL THEN
        SELECT LEAST(
            0, max(j.priority) FILTER (WHERE j.queue_name = queue AND (j.scheduled_at IS NULL OR j.scheduled_at <= now())),
            min(j.priority) FILTER (WHERE j.lock = turn) - 1
        ) INTO place
        FROM procrastinate_jobs j WHERE j.status IN ('todo', 'doing') AND (j.queue_name = queue OR j.lock = turn);
    END IF;
    INSERT INTO procrastinate_jobs (queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at)
    VALUES (queue, task, coalesce(place, 0), turn, once, args, at)
    ON CONFLICT (queueing_lock) WHERE status = 'todo' DO UPDATE SET scheduled_at =
        CASE WHEN procrastinate_jobs.scheduled_at IS NULL OR excluded.scheduled_at IS NULL THEN NULL
        ELSE LEAST(procrastinate_jobs.scheduled_at, excluded.scheduled_at) END
    RETURNING queue_name INTO queue;
    PERFORM pg_notify('procrastinate_queue_v1#' || queue, '{"type": "job_inserted", "job_id": 0}');
END $$;
REVOKE ALL ON FUNCTION tasks.defer(text, text, jsonb, text, text, timestamptz) FROM PUBLIC;

-- Wakes the workers of the tasks that wait for one that ends; otherwise they would find them at their next look.
CREATE FUNCTION tasks.announce_next() RETURNS trigger LANGUAGE plpgsql SET search_path = tasks, pg_temp AS $$
BEGIN
    PERFORM pg_notify('procrastinate_queue_v1#' || waiting.queue_name, '{"type": "job_inserted", "job_id": 0}')
    FROM (SELECT DISTINCT j.queue_name FROM procrastinate_jobs j WHERE j.lock = OLD.lock AND j.status = 'todo') waiting;
    RETURN NULL;
END $$;
CREATE TRIGGER announce_next_after_delete AFTER DELETE ON tasks.procrastinate_jobs
    FOR EACH ROW WHEN (OLD.status = 'doing' AND OLD.lock IS NOT NULL) EXECUTE FUNCTION tasks.announce_next();
CREATE TRIGGER announce_next_after_update AFTER UPDATE OF status ON tasks.procrastinate_jobs
    FOR EACH ROW WHEN (OLD.status = 'doing' AND NEW.status <> 'doing' AND OLD.lock IS NOT NULL) EXECUTE FUNCTION tasks.announce_next();

-- A task that is run again, after a failure or the end of its worker, may wait beside one that was added since.
CREATE FUNCTION tasks.free_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.queueing_lock := NULL; RETURN NEW; END $$;
CREATE TRIGGER free_once BEFORE UPDATE OF status ON tasks.procrastinate_jobs
    FOR EACH ROW WHEN (OLD.status = 'doing' AND NEW.status = 'todo') EXECUTE FUNCTION tasks.free_once();

-- An event is fanned out by the task that is added with it.
CREATE FUNCTION public.fan_out_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tasks.defer('fan_out', 'quick', '{}', 'fan_out', NULL, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER fan_out_events AFTER INSERT ON public.outbox FOR EACH STATEMENT EXECUTE FUNCTION public.fan_out_events();
