"""Evaluations carried out for real: the API that their agents report to, the scheduler that starts them, the worker that watches them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.watch import Watcher
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import Evaluation
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher
from control_plane.queue import cycle
from control_plane.queue.tables import reservations
from core.errors import FtError
from core.workload import Kind
from ft_assets.adapters import reevaluation_step
from ft_assets.evals import step
from tests.support.servers.served_app import served


@dataclass
class Following:
    """A platform whose evaluations are started, watched and ended while :func:`following` lasts."""

    platform: Platform
    launcher: Launcher
    failures: list[FtError] = field(default_factory=list)
    """Why attempts failed, in order."""

    def evaluate(self, tenant: str, job_id: str) -> Evaluated:
        """Carry out a job's own evaluation as the runs of the Dagster job do, one attempt after the other."""
        while True:
            self.reserve(tenant, job_id)
            try:
                return step.evaluate(self.platform, self.launcher, tenant, job_id)
            except FtError as error:
                self.failures.append(error)
                if self.state(tenant, job_id) is not JobState.EVALUATING:
                    raise

    def evaluate_order(self, order: Evaluation) -> Evaluation:
        """Carry out an ordered evaluation; one attempt."""
        self.reserve(order.tenant_id, order.job_id)
        return reevaluation_step.run(self.platform, self.launcher, order.id)

    def reserve(self, tenant: str, job_id: str) -> Claim | None:
        """Have the scheduler start the evaluation, if it waits for that."""
        cycle.run_cycle(self.platform)
        with self.platform.engine.connect() as conn:
            held = sa.select(reservations.c.kind).where(reservations.c.job_id == job_id, reservations.c.released_at.is_(None))
            kind = conn.execute(held).scalar()
        return attempts.claim(self.platform, tenant, job_id) if kind == Kind.EVALUATE else None

    def state(self, tenant: str, job_id: str) -> JobState:
        with self.platform.engine.connect() as conn:
            return job_row(conn, tenant, job_id).state

    def outcomes(self, job_id: str) -> list[str | None]:
        """How the attempts of the job's evaluations ended."""
        a, r = attempts_table.c, reservations.c
        query = sa.select(a.outcome).join(reservations, (r.job_id == a.job_id) & (r.attempt == a.attempt))
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query.where(a.job_id == job_id, r.kind == Kind.EVALUATE).order_by(a.attempt)).scalars())

    def error(self, job_id: str) -> dict[str, str]:
        with self.platform.engine.connect() as conn:
            found: dict[str, str] = conn.execute(sa.select(jobs.c.error).where(jobs.c.id == job_id)).scalar_one()
        return found


@contextmanager
def following(platform: Platform, launcher: Launcher) -> Iterator[Following]:
    """Serve the API over `platform`, and watch its attempts as the worker does."""
    ending = threading.Event()
    with served(create_app(platform)) as url:
        platform = replace(platform, settings=replace(platform.settings, internal_url=url))
        watcher = Watcher(platform=platform, launcher=launcher, answers=lambda: True)

        def watch() -> None:
            while not ending.wait(0.1):
                watcher.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield Following(platform=platform, launcher=launcher)
        finally:
            ending.set()
            thread.join(timeout=30)
            for status in launcher.list():
                launcher.stop(status.name, grace_s=1.0)
            watcher.settle()
            watcher.close()


def out_dir(platform: Platform, job_id: str, evaluation_id: str | None = None) -> Path:
    """Directory of the evaluation's process on the node."""
    return platform.settings.job_dir(job_id) / "evals" / (evaluation_id or "own")
