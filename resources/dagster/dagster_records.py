"""Erases a tenant's records in Dagster and searches for what is left: runs, events, tags, logs, partition keys and ticks.

Runs are deleted through Dagster's API. It has no API for other records that name a tenant (asset checks, an asset's last materialization,
ticks), so those are changed in its tables. The tables are listed from the database, so tables that a later version adds are included if
they have an ``id``. ``alembic_version`` has none and holds only the schema version; any other table without one is reported as not
searched. ``python -m resources.dagster.dagster_records`` reads a request from standard input (:mod:`resources.tenant_records`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError

from core.errors import Conflict, FtError
from core.layout import STEP_LOGS
from resources.database.engine import make_engine, without_password

if TYPE_CHECKING:
    from dagster import DagsterInstance

PARTITIONS = ("jobs", "datasets")
"""Names of the dynamic partitions definitions (``ft_assets.partitions``)."""
ID = "[A-Za-z]+[-_][0-9a-f]{16,40}"
"""Pattern of the ids of jobs, files, adapters and evaluations."""
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
"""Pattern of run ids."""
DELETED = frozenset(
    {"event_logs", "asset_check_executions", "asset_event_tags", "asset_daemon_asset_evaluations", "job_ticks", "run_tags",
     "dynamic_partitions", "concurrency_slots", "pending_steps", "backfill_tags"}
)  # fmt: skip
"""Tables from which rows that name the tenant are deleted. In the others, whose rows Dagster needs, the names are overwritten."""
NAMES_NOTHING = frozenset({"alembic_version"})
"""Tables without an ``id`` whose text never names a tenant."""
ERASED = "erased"
LAST_EVENT = frozenset({("asset_keys", name) for name in ("last_materialization", "last_run_id", "cached_status_data")})
"""Columns with an asset's newest materialization, of any tenant; erasure sets them to the newest one that remains."""
SCAN_S = 600.0
"""Statement timeout for one text column: regular expressions read about 50 MB/s."""
NEWEST = """UPDATE asset_keys SET cached_status_data = NULL, last_run_id = (newest).run_id, last_materialization = (newest).event
  FROM (SELECT k.id, (SELECT e FROM event_logs e WHERE e.asset_key = k.asset_key AND e.dagster_event_type = 'ASSET_MATERIALIZATION'
                      ORDER BY e.id DESC LIMIT 1) AS newest FROM asset_keys k WHERE k.id = ANY(:ids)) found
  WHERE asset_keys.id = found.id"""


def erase(instance: DagsterInstance, engine: Engine, names: Names, *, budget_s: float) -> dict[str, int]:
    """Delete the tenant's records and return counts by kind. Stops between two records after `budget_s` seconds."""
    runs = _runs(engine, names)
    until = time.monotonic() + budget_s
    counts = {"runs": _delete_runs(instance, runs, until), "partition_keys": _delete_keys(instance, names.tenant, until)}
    if time.monotonic() < until:
        names = Names(tenant=names.tenant, ids=names.ids, runs=frozenset(runs))
        counts |= _erase_rows(engine, names) | {"log_files": _delete_logs(instance, names)}
    return {kind: count for kind, count in counts.items() if count}


def search(instance: DagsterInstance, engine: Engine, names: Names) -> dict[str, Any]:
    """Report where the database's text columns and the log directory name the tenant."""
    logs = _logs(instance)
    with _reading(engine) as conn:
        columns = _columns(conn)
        found = [f"{table}.{column}" for table, column in columns if _rows(conn, table, column, names)]
        found += ["snapshots.snapshot_body"] if _in_snapshots(conn, names) else []
        found += _shared_logs(instance, names)
        unread = _tables_without_id(conn)
    return {
        "store": f"dagster {without_password(engine.url.render_as_string(hide_password=False))}",
        "searched": [
            *(f"{table}.{column}" for table, column in columns),
            "snapshots.snapshot_body",
            f"{STEP_LOGS}/",
            *([f"{logs}/"] if logs else []),
        ],
        "found": [*found, *(str(path) for path in _naming(logs, names))],
        "not_searched": unread,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names by which a record identifies a tenant."""

    tenant: str
    ids: frozenset[str]
    runs: frozenset[str] = frozenset()
    """Ids of runs that were just deleted."""

    @property
    def pattern(self) -> str:
        """Pattern of the tenant's id in tags, run config, partition keys and object keys. The id alone could be any word."""
        quote = r'\\*"'
        return rf"tenant{quote}: {quote}{self.tenant}{quote}|tenants/{self.tenant}/|(^|[^a-z0-9-]){self.tenant}:[a-z]+[-_]"

    @property
    def tokens(self) -> str:
        return f"{ID}|{UUID}"

    def within(self, text: str) -> bool:
        """Whether `text` names the tenant."""
        known = self.ids | self.runs
        return bool(re.search(self.pattern, text)) or any(token in known for token in re.findall(self.tokens, text))

    def overwritten(self, text: str) -> str:
        known = self.ids | self.runs
        text = re.sub(self.tokens, lambda m: ERASED if m[0] in known else m[0], text)
        return re.sub(self.pattern, lambda m: m[0].replace(self.tenant, ERASED), text)


def _columns(conn: Connection) -> list[tuple[str, str]]:
    """List the text columns of Dagster's tables that have an ``id``."""
    query = """SELECT c.table_name, c.column_name FROM information_schema.columns c
      JOIN information_schema.columns i ON i.table_schema = c.table_schema AND i.table_name = c.table_name AND i.column_name = 'id'
      WHERE c.table_schema = current_schema() AND c.data_type IN ('text', 'character varying', 'json', 'jsonb')
      ORDER BY c.table_name, c.column_name"""
    return [(str(table), str(column)) for table, column in conn.execute(sa.text(query))]


def _tables_without_id(conn: Connection) -> list[str]:
    """List the tables that :func:`_columns` skips and that may name a tenant."""
    query = """SELECT table_name FROM information_schema.columns WHERE table_schema = current_schema()
      GROUP BY table_name HAVING NOT bool_or(column_name = 'id') ORDER BY table_name"""
    return [str(table) for table in conn.execute(sa.text(query)).scalars() if table not in NAMES_NOTHING]


def _rows(conn: Connection, table: str, column: str, names: Names) -> list[int]:
    """Return the ids of rows that name the tenant. Reads the column once, however many ids the tenant has."""
    query = sa.text(
        f'SELECT id FROM "{table}" WHERE "{column}"::text ~ :pattern OR EXISTS '
        f"""(SELECT FROM regexp_matches("{column}"::text, :tokens, 'g') AS m WHERE m[1] = ANY(:known))"""
    )
    values = {"pattern": names.pattern, "tokens": f"({names.tokens})", "known": sorted(names.ids | names.runs)}
    return list(conn.execute(query, values).scalars())


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction whose statement timeout allows a full table scan."""
    with engine.begin() as conn:
        conn.execute(sa.text("SELECT set_config('statement_timeout', :limit, true)"), {"limit": f"{SCAN_S * 1000:.0f}"})
        yield conn


def _runs(engine: Engine, names: Names) -> list[str]:
    """Find the tenant's runs by their tags, partition and configuration."""
    query = sa.text("SELECT run_id FROM runs WHERE id = ANY(:ids) ORDER BY id")
    with _reading(engine) as conn:
        return list(conn.execute(query, {"ids": _rows(conn, "runs", "run_body", names)}).scalars())


def _delete_runs(instance: DagsterInstance, runs: Collection[str], until: float) -> int:
    """Delete runs, one by one; refuses while one is in progress."""
    from dagster import DagsterRunStatus

    idle, deleted = (DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED), 0
    for run_id in runs:
        if time.monotonic() >= until:
            break
        run = instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished and run.status not in idle:
            raise Conflict(f"Dagster run {run_id} is {run.status.value}; deletion continues when it ends")
        delete_run(instance, run_id)
        deleted += 1
    return deleted


def delete_run(instance: DagsterInstance, run_id: str) -> None:
    """Delete a run with its events, after the output of its steps: once the run is gone, nothing points to that."""
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    instance.delete_run(run_id)


def _delete_keys(instance: DagsterInstance, tenant: str, until: float) -> int:
    mine = [(name, key) for name in PARTITIONS for key in instance.get_dynamic_partitions(name) if key.startswith(f"{tenant}:")]
    for count, (name, key) in enumerate(mine):
        if time.monotonic() >= until:
            return count
        instance.delete_dynamic_partition(name, key)
    return len(mine)


def _erase_rows(engine: Engine, names: Names) -> dict[str, int]:
    """Delete or overwrite rows outside the tenant's runs that name it. A tick in progress is left for the next call."""
    counts: dict[str, int] = {}
    with _reading(engine) as conn:
        found = {(table, column): rows for table, column in _columns(conn) if (rows := _rows(conn, table, column, names))}
        assets = {row for (table, column), rows in found.items() if (table, column) in LAST_EVENT for row in rows}
        for (table, column), rows in found.items():
            if table in DELETED:
                ended = " AND status <> 'STARTED'" if table == "job_ticks" else ""
                changed = conn.execute(sa.text(f'DELETE FROM "{table}" WHERE id = ANY(:ids){ended}'), {"ids": rows}).rowcount
            elif (table, column) in LAST_EVENT:
                continue
            else:
                changed = _overwrite(conn, table, column, rows, names)
            counts[table] = counts.get(table, 0) + changed
        if assets:  # once the tenant's events are gone
            counts["asset_keys"] = conn.execute(sa.text(NEWEST), {"ids": sorted(assets)}).rowcount
    return counts


def _overwrite(conn: Connection, table: str, column: str, rows: Collection[int], names: Names) -> int:
    for id_ in rows:
        text = conn.execute(sa.text(f'SELECT "{column}"::text FROM "{table}" WHERE id = :id'), {"id": id_}).scalar_one()
        conn.execute(sa.text(f'UPDATE "{table}" SET "{column}" = :text WHERE id = :id'), {"id": id_, "text": names.overwritten(text)})
    return len(rows)


def _in_snapshots(conn: Connection, names: Names) -> bool:
    """Search the compressed snapshots of jobs and plans; there is one per version of a job, not per run."""
    bodies = conn.execute(sa.text("SELECT snapshot_body FROM snapshots")).scalars()
    return any(names.within(zlib.decompress(bytes(body)).decode()) for body in bodies)


def _logs(instance: DagsterInstance) -> Path | None:
    """Return the local directory of output: what is being written, and what was before it became objects."""
    from resources.dagster.private_api import LocalComputeLogManager

    logs = instance.compute_log_manager
    local = getattr(logs, "local_manager", logs)
    return Path(local.get_captured_local_path(["x"], "x")).parent if isinstance(local, LocalComputeLogManager) else None


def _shared_logs(instance: DagsterInstance, names: Names) -> list[str]:
    """Return the keys of output that belongs to no tenant and names the tenant."""
    shared = getattr(instance.compute_log_manager, "shared", None)  # tests have Dagster's own managers
    return [key for key, text in shared() if names.within(text)] if shared else []


def _naming(directory: Path | None, names: Names) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")) if directory else ():
        if path.is_file() and names.within(path.read_text(errors="replace")):
            yield path


def _delete_logs(instance: DagsterInstance, names: Names) -> int:
    found = list(_naming(_logs(instance), names))
    for path in found:
        path.unlink(missing_ok=True)
    keys = _shared_logs(instance, names)
    for key in keys:
        instance.compute_log_manager.objects.delete(key)  # type: ignore[attr-defined]
    return len(found) + len(keys)


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    os.environ.setdefault("DAGSTER_POSTGRES_URL", order["url"])  # dagster.yaml reads it
    home = os.environ.get("DAGSTER_HOME") or order["home"]
    if not (Path(home) / "dagster.yaml").exists():
        sys.exit(f"{home}/dagster.yaml does not exist; set DAGSTER_HOME, or start the stack with `ft up`")
    from dagster import DagsterInstance

    names = Names(tenant=order["tenant"], ids=frozenset(order["ids"]))
    try:
        with DagsterInstance.from_config(home) as instance:
            engine = make_engine(order["url"])
            answer = (
                search(instance, engine, names) if order["call"] == "search" else erase(instance, engine, names, budget_s=order["budget_s"])
            )
    except (FtError, OperationalError) as error:
        sys.exit(str(error).partition("\n")[0])
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
