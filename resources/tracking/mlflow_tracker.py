"""Tracks attempts in MLflow: one run per attempt, written by a background thread from a bounded queue.

Only that thread imports MLflow, which takes seconds.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import queue
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from control_plane.platform.protocols import NO_TABLES, ObjectStore, Tables, TrackedRun
from core import layout
from core.errors import InvalidRequest
from core.telemetry.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

MAX_QUEUED = 20_000
"""Metric lines, about 1 KB each, that are kept while the store is unreachable; further ones are dropped."""
MAX_BATCH = 1000
"""Metrics per request: MLflow's limit."""
MAX_PARAMS, MAX_PARAM_CHARS = 100, 6000
"""Parameters per request, and characters per value: MLflow's limits."""
MAX_FILE_BYTES, MAX_FILES = 16 << 20, 20
"""Size of a file (a table of 100,000 steps has 10 MB), and number of waiting files; others are left out and reported."""
MAX_UPLOADS = 3
"""Upload attempts per file: a store may accept metrics but never files."""
GATHER_S = 1.0
"""Seconds over which metrics are batched: the store is written once a second, however fast the steps are."""
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 60.0
PROBLEM_AFTER_S = 20.0
"""Seconds of failures before they are reported: a restart of the store, or its creation by two processes at once, takes less."""
QUIET: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the thread retries
}
"""Defaults for MLflow's environment."""
STATUS: Mapping[str, str] = {"succeeded": "FINISHED", "cancelled": "KILLED", "paused": "KILLED", "preempted": "KILLED"}
"""MLflow's status for each outcome of an attempt; others are ``FAILED``."""
TABLES = "mlflow.loggedArtifacts"
"""Tag of a run by which MLflow's UI and ``load_table`` find its tables."""
SQLITE = "sqlite:///"
SCHEME = "ft-objects"
"""Of the places of artifacts that are objects of the platform's store; an entry point in pyproject.toml names it too."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_\-. :/]")
NOT_METRICS = frozenset({"step", "time", "total_steps"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowTracker:
    uri: str
    """Tracking store: ``sqlite:///...``, ``postgresql+psycopg2://...`` or ``http://...``."""
    objects: ObjectStore
    """Where the files of runs are, unless ``uri`` is a server's, which has a store of its own."""
    _ended: list[MlflowRunLog] = field(default_factory=list, repr=False, compare=False)

    def begin(self, run: TrackedRun) -> MlflowRunLog:
        """See :class:`control_plane.platform.protocols.Tracker`. Returns before anything is imported or opened."""
        made = MlflowRunLog(uri=self.uri, objects=self.objects, run=run, on_end=self._ended.append)
        made.start()
        return made

    def attach(self, run: TrackedRun, files: Mapping[str, bytes], tables: Tables = NO_TABLES) -> None:
        made = MlflowRunLog(uri=self.uri, objects=self.objects, run=run, over=True, on_end=self._ended.append)
        made.attach(files, tables)
        made.start()
        made.end(outcome="")

    def flush(self, *, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self._ended:
            ended = self._ended.pop()
            if not ended.flush(timeout_s=max(0.0, until - time.monotonic())):
                log.warning("the end of %s is not in MLflow: the store did not accept it within %.0f s", ended.run.name, timeout_s)


@dataclass(kw_only=True)
class MlflowRunLog:
    uri: str
    objects: ObjectStore
    run: TrackedRun
    over: bool = False
    """The run has already ended: files are added, and its end stays unchanged."""
    problem_after_s: float = PROBLEM_AFTER_S
    on_end: Callable[[MlflowRunLog], None] | None = None
    _lines: queue.Queue[Mapping[str, Any]] = field(default_factory=lambda: queue.Queue(maxsize=MAX_QUEUED))
    _files: deque[tuple[str, bytes]] = field(default_factory=deque)
    _tables: set[str] = field(default_factory=set)
    """Paths of files that are tables."""
    _uploads: int = 0
    """Failed uploads of the first file."""
    _left_out: list[str] = field(default_factory=list)
    _dropped: int = 0
    _error: str = ""
    _failing_since: float | None = None
    _lost: bool = False
    _outcome: str | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _give_up: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._write, daemon=True, name=f"mlflow-{self.run.name}")
        self._thread.start()

    def log(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        for line in metrics:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._dropped += 1

    def attach(self, files: Mapping[str, bytes], tables: Tables = NO_TABLES) -> None:
        self._tables |= set(tables)
        for path, body in (*files.items(), *((path, _table(rows)) for path, rows in tables.items())):
            if len(body) > MAX_FILE_BYTES or len(self._files) == MAX_FILES:
                self._left_out.append(f"{path} ({len(body)} bytes; limit {MAX_FILES} files of {MAX_FILE_BYTES} bytes)")
            else:
                self._files.append((path, body))

    def problem(self) -> str | None:
        since = self._failing_since
        if self._left_out:
            return f"files were left out: {', '.join(self._left_out)}"
        if self._dropped:
            return f"{self._dropped} lines of metrics were dropped: {self._error or 'the store is too slow'}"
        if self._lost:
            return self._error
        return self._error if since is not None and time.monotonic() - since >= self.problem_after_s else None

    def end(self, *, outcome: str) -> None:
        self._outcome = outcome
        self._lost = self._failing_since is not None
        if self._lost:
            self._give_up.set()
        self._over.set()
        if self.on_end is not None:
            self.on_end(self)

    def flush(self, *, timeout_s: float) -> bool:
        """Wait for pending writes of an ended run. Returns False if they take longer; the rest is then lost."""
        if self._thread is not None and self._over.is_set():
            self._thread.join(timeout_s)
        self._give_up.set()
        return self._thread is not None and not self._thread.is_alive()

    def _write(self) -> None:
        """Open the run, then write metrics and files until the run ends or :meth:`flush` gives up."""
        opened: tuple[MlflowClient, str] | None = None
        waiting: list[Metric] = []
        pause_s = RETRY_FIRST_S
        while not self._give_up.is_set():
            try:
                opened = opened or _open(self.uri, self.run, over=self.over)
                if opened is None:
                    log.warning("%s is not in MLflow; its files are not stored", self.run.name)
                    return
                waiting = waiting or self._gather()
                client, run_id = opened
                if waiting:
                    client.log_batch(run_id, metrics=waiting[:MAX_BATCH])
                    waiting = waiting[MAX_BATCH:]
                elif self._files:
                    self._upload(client, run_id)
                elif self._over.is_set() and self._lines.empty():
                    if not self.over:
                        client.set_tag(run_id, "ft.outcome", self._outcome)
                        client.set_terminated(run_id, STATUS.get(self._outcome or "", "FAILED"))
                    return
                pause_s, self._failing_since = RETRY_FIRST_S, None
            except Exception as error:
                self._failing_since = self._failing_since or time.monotonic()
                self._error = f"{type(error).__name__}: {without_credentials(str(error).strip())[:200]}"
                log.warning("MLflow did not accept %s: %s; retrying in %.0f s", self.run.name, self._error, pause_s)
                self._give_up.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)

    def _upload(self, client: MlflowClient, run_id: str) -> None:
        """Store the first waiting file, or give up after :data:`MAX_UPLOADS` attempts."""
        path, body = self._files[0]
        try:
            self._store(client, run_id, path, body)
            if path in self._tables:
                _list_table(client, run_id, path)
        except Exception as error:
            self._uploads += 1
            if self._uploads < MAX_UPLOADS:
                raise
            self._left_out.append(f"{path} ({type(error).__name__} in {MAX_UPLOADS} attempts)")
            log.warning("MLflow does not accept %s of %s; it is left out", path, self.run.name)
        self._files.popleft()
        self._uploads = 0

    def _store(self, client: MlflowClient, run_id: str, path: str, body: bytes) -> None:
        place = client.get_run(run_id).info.artifact_uri
        if place.startswith(f"{SCHEME}:"):
            self.objects.put_bytes(key_of(place, path), body)
            return
        with tempfile.TemporaryDirectory(prefix="ft-mlflow-") as directory:  # a server's store, or that of an older experiment
            file = Path(directory) / PurePosixPath(path).name
            file.write_bytes(body)
            folder = str(PurePosixPath(path).parent)
            client.log_artifact(run_id, str(file), None if folder == "." else folder)

    def _gather(self) -> list[Metric]:
        """Collect metrics for up to :data:`GATHER_S`; returns none at the end of the run."""
        until = time.monotonic() + GATHER_S
        found: list[Metric] = []
        while len(found) < MAX_BATCH:
            left = 0.05 if self._over.is_set() else until - time.monotonic()
            try:
                found += _metrics(self._lines.get(timeout=max(0.01, min(left, 0.1))))
            except queue.Empty:
                if left <= 0.1:
                    break
        return found


def _open(uri: str, run: TrackedRun, *, over: bool = False) -> tuple[MlflowClient, str] | None:
    """Return a client and the run's id: an earlier follower's run of this attempt, or a new one under the job's first attempt.

    If the run is `over`, it is neither changed nor created: returns None if it does not exist.
    """
    from mlflow.entities import Param

    client = open_client(uri)
    experiment = _experiment(client, run.tenant, None if uri.startswith("http") else artifacts_at(run.tenant))
    job = client.search_runs([experiment], f"tags.`ft.job` = '{run.job_id}'", max_results=1000)
    same = next((r for r in job if r.info.run_name == run.name), None)
    if over:
        return None if same is None else (client, same.info.run_id)
    if same is not None:
        client.update_run(same.info.run_id, status="RUNNING")
        return client, same.info.run_id
    tags = {f"ft.{k}": v for k, v in run.tags.items()} | {"ft.job": run.job_id, "ft.attempt": str(run.attempt)}
    for orphan in job:
        if orphan.info.status == "RUNNING":  # its follower died before this attempt began
            client.set_terminated(orphan.info.run_id, "FAILED")
    if job:
        first = min(job, key=lambda r: int(r.data.tags.get("ft.attempt", "0")))
        tags["mlflow.parentRunId"] = first.info.run_id
    made: str = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
    params = [Param(k, v[:MAX_PARAM_CHARS]) for k, v in run.params.items()]
    for i in range(0, len(params), MAX_PARAMS):
        client.log_batch(made, params=params[i : i + MAX_PARAMS])
    return client, made


def _table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return `rows`, which have the columns of the first, in the form of ``mlflow.log_table``; values that are not finite are null."""
    columns = list(rows[0]) if rows else []
    return json.dumps({"columns": columns, "data": [[_finite(row[name]) for name in columns] for row in rows]}).encode()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _list_table(client: MlflowClient, run_id: str, path: str) -> None:
    """Show a file as a table, as ``mlflow.log_table`` does, which would append its rows to those of an earlier evaluation."""
    listed = json.loads(client.get_run(run_id).data.tags.get(TABLES, "[]"))
    if (entry := {"path": path, "type": "table"}) not in listed:
        client.set_tag(run_id, TABLES, json.dumps([*listed, entry]))


def open_client(uri: str) -> MlflowClient:
    """Import MLflow and return a client of the store at `uri`, which is created if it is a missing SQLite file."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):  # they log each schema check
        logging.getLogger(name).setLevel(logging.WARNING)
    file = file_of(uri)
    if file is not None:
        make_store(file)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store; None for others."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def artifacts_at(tenant: str) -> str:
    """Return the place of the artifacts of a tenant's new experiment (:mod:`resources.tracking.mlflow_artifacts`)."""
    return f"{SCHEME}:/{layout.mlflow_prefix(tenant)}"


def key_of(uri: str, path: str = "") -> str:
    """Return the key of a file of a run's artifacts, or of their directory."""
    parts = urlsplit(uri)
    if parts.scheme != SCHEME or parts.netloc:
        raise InvalidRequest(f"artifacts at {uri[:200]!r} are not at {SCHEME}:/<key>", code="invalid_artifact_uri")
    return str(PurePosixPath(parts.path.lstrip("/")) / path)


def older_artifacts(file: Path, tenant: str) -> Path:
    """Return the directory, next to an SQLite store, of the artifacts of experiments made before they were objects."""
    return file.parent / "mlflow-artifacts" / tenant


def make_store(file: Path) -> None:
    """Create an SQLite store atomically, unless it exists.

    MLflow runs dozens of migrations without a lock or a transaction around them: two processes at once, or a killed one, would leave a
    store that cannot be opened.
    """
    from mlflow.tracking import MlflowClient

    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            return
        draft = file.with_name(f"{file.name}.draft")
        draft.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"{SQLITE}{draft}").search_experiments(max_results=1)
        draft.replace(file)


def _experiment(client: MlflowClient, tenant: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(tenant)
    if found is None:
        try:
            return str(client.create_experiment(tenant, artifact_location=artifacts, tags={"ft.tenant": tenant}))
        except MlflowException:  # another attempt of the tenant created it first
            found = client.get_experiment_by_name(tenant)
            if found is None:
                raise
    return str(found.experiment_id)


def _metrics(line: Mapping[str, Any]) -> list[Metric]:
    from mlflow.entities import Metric

    step, at_ms = int(line["step"]), int(1000 * line.get("time", time.time()))
    measured = {k: v for k, v in line.items() if k not in NOT_METRICS and isinstance(v, int | float) and not isinstance(v, bool)}
    return [Metric(NOT_IN_NAMES.sub("_", k), float(v), at_ms, step) for k, v in measured.items() if math.isfinite(v)]
