"""What jobs came to is looked up, however long their curves are."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.sweeps import comparison
from control_plane.platform.context import Platform
from tests.support.platform.database_roles import as_owner

MANY = 20_000
CURVE = """INSERT INTO job_events (id, job_id, level, type, code, message, data, created_at)
    SELECT 'curve-' || n, :job_id, 'info', 'metrics', 'metrics', 'm', jsonb_build_object('step', n, :name, n / 10.0), now()
    FROM generate_series(CAST(:first AS int), CAST(:last AS int)) n"""


def report(conn: Connection, job_id: str, name: str, first: int, last: int) -> None:
    conn.execute(sa.text(CURVE.replace(":name", f"'{name}'")), {"job_id": job_id, "first": first, "last": last})


def looked_at(plan: dict[str, Any]) -> float:
    """Rows that a plan's scans of events read, those included that it threw away."""
    own = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if plan.get("Relation Name") == "job_events" else 0
    return own * plan["Actual Loops"] + sum(looked_at(p) for p in plan.get("Plans", ()))


def test_the_end_of_a_long_curve_is_found_without_the_rest_of_it(platform: Platform, job_id: str) -> None:
    with platform.engine.begin() as conn:
        report(conn, job_id, "train_loss", 1, MANY)
        report(conn, job_id, "valid_loss", MANY + 1, MANY + 1)
        report(conn, job_id, "train_loss", MANY + 2, 2 * MANY)
    with as_owner(platform).begin() as conn:
        conn.execute(sa.text("ANALYZE job_events"))
    ran: list[tuple[str, Any]] = []
    sa.event.listen(platform.engine, "before_cursor_execute", lambda *given: ran.append((given[2], given[3])))
    with platform.engine.connect() as conn:
        job = comparison.jobs_by_id(conn, [job_id])[job_id]
        assert comparison.measured(conn, [job])[job_id] == {"train_loss": 4000.0, "eval_loss": 2000.1}
        of_events = [r for r in ran if "job_events" in r[0]]
        plans = [conn.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", given).scalar_one() for query, given in of_events]
    read = [looked_at((json.loads(p) if isinstance(p, str) else p)[0]["Plan"]) for p in plans]
    assert len(read) == 2 and max(read) <= 2, read
