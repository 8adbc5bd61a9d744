"""Ten jobs on a machine with ten pretended GPUs: each process sees the one that its reservation names, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.attempts import service as attempts
from control_plane.attempts import start
from control_plane.attempts.watch import Watcher
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from control_plane.queue.launches import due_runs
from control_plane.queue.tables import reservations
from tests.support.jobs.followed_jobs import Job, Scripted, plain_weights, store_pack, until
from tests.support.jobs.queued_jobs import Queued
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario
from tests.support.servers.served_app import served

STEPS = 6
NAMES = [str(number) for number in range(20, 30)]
"""CUDA names of the GPUs: the device number of a reservation is the position in this list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A process that trains."""

    pid: int
    job: str
    attempt: int
    visible: str


@dataclass
class TenGpus:
    platform: Platform
    tenant: str
    launcher: Scripted
    watcher: Watcher
    jobs: list[Job]
    started: set[str] = field(default_factory=set)

    def look(self) -> None:
        """What scheduler, steps and worker do at once."""
        cycle.run_cycle(self.platform)
        for due in due_runs(self.platform, ("train",)):
            held = attempts.claim(self.platform, self.tenant, due.job_id)
            if held.workload not in self.started:
                start.start_or_adopt(self.platform, self.launcher, held)
                self.started.add(held.workload)
        self.watcher.look()
        self.check_held_once()

    def training(self) -> list[Seen]:
        """The live training processes, and the GPU that each of them sees."""
        root, found = f"{self.platform.settings.work_dir}/jobs/", []
        for process in psutil.process_iter():
            try:
                run_file, environment = Path(process.cmdline()[-1]), process.environ()
            except (psutil.Error, IndexError):
                continue
            if str(run_file).startswith(root) and run_file.name.startswith("run-a"):
                attempt = int(run_file.stem.removeprefix("run-a"))
                found.append(Seen(pid=process.pid, job=run_file.parent.name, attempt=attempt, visible=environment["CUDA_VISIBLE_DEVICES"]))
        return found

    def check_held_once(self) -> None:
        seen = self.training()
        for one, other in combinations(seen, 2):
            assert one.visible != other.visible, (one, other)
        numbers = {(row.job_id, row.attempt): row.devices for row in self.rows()}
        for each in seen:
            assert numbers[each.job, each.attempt] == [[NAMES.index(each.visible)]], each

    def rows(self) -> list[sa.Row[tuple[object, ...]]]:
        with self.platform.engine.connect() as conn:
            return list(conn.execute(sa.select(reservations)).all())

    def run(self, until_: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.look()
            return until_()

        until(looked, timeout_s=120.0)

    def running(self, attempt_of: dict[str, int]) -> bool:
        """Whether all jobs train at this moment, in these attempts."""
        return {(s.job, s.attempt) for s in self.training()} == set(attempt_of.items()) and all(
            (job.work_dir / "visible_devices").exists() and job.events("job_running") for job in self.jobs
        )


@pytest.fixture
def machine(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TenGpus]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(NAMES))
    platform = new_platform(local_gpus="10")
    with ExitStack() as serving:
        url = serving.enter_context(served(create_app(platform)))
        platform = replace(platform, settings=replace(platform.settings, internal_url=url))
        queue = Queued(platform=platform, write_rows=write_chat_rows)
        tenant, launcher = queue.tenant(), Scripted(platform.settings.work_dir / "launcher")
        store_pack(platform, tenant, SPEC.pack_fingerprint)
        spec = replace(SPEC, base_digest=platform.models.get("tiny-base").digest)
        jobs = [Job(platform, tenant, queue.job(tenant), launcher) for _ in NAMES]
        for job in jobs:
            queue.set(job.id, spec=spec.to_dict())
            Scenario(steps=STEPS, hold_at=3).write(job.work_dir)
        watcher = Watcher(platform=platform, launcher=launcher, answers=lambda: True)
        yield TenGpus(platform=platform, tenant=tenant, launcher=launcher, watcher=watcher, jobs=jobs)
        for name in launcher.names:
            launcher.stop(name, grace_s=0.1)
        watcher.settle()
        watcher.close()


@pytest.mark.slow
def test_ten_jobs_train_at_once_on_a_gpu_each_also_after_kills(machine: TenGpus) -> None:
    attempt_of = dict.fromkeys((job.id for job in machine.jobs), 1)
    machine.run(lambda: machine.running(attempt_of))
    first = machine.training()
    assert sorted(seen.visible for seen in first) == NAMES, "all ten at once"
    for seen in first[:2]:
        os.kill(seen.pid, signal.SIGKILL)
    agent = psutil.Process(first[2].pid).parent()
    assert agent is not None
    agent.kill()
    attempt_of |= {seen.job: 2 for seen in first[:3]}
    machine.run(lambda: machine.running(attempt_of))
    assert sorted(seen.visible for seen in machine.training()) == NAMES

    for job in machine.jobs:
        (job.work_dir / "go").touch()
    machine.run(lambda: all(job.events("job_evaluating") for job in machine.jobs))
    assert {job.weights() for job in machine.jobs} == {plain_weights(STEPS)}, "each adapter is that of a lone run"
    rows = machine.rows()
    assert len([row for row in rows if row.attempt <= 2]) >= 13
    for one, other in combinations(rows, 2):
        if one.devices == other.devices:
            earlier, later = sorted((one, other), key=lambda row: row.granted_at)
            assert earlier.released_at is not None, (one, other)
            assert earlier.released_at <= later.granted_at, (one, other)


def test_a_second_reservation_of_a_held_gpu_is_refused_by_the_database(machine: TenGpus) -> None:
    cycle.run_cycle(machine.platform)
    one, other, *_ = machine.rows()
    assert one.devices != other.devices
    this = (reservations.c.job_id == other.job_id) & (reservations.c.attempt == other.attempt)
    with pytest.raises(sa.exc.IntegrityError, match="pk_held_devices"), machine.platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(this).values(devices=one.devices))
    with machine.platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(reservations.c.job_id == one.job_id).values(released_at=machine.platform.clock()))
        conn.execute(sa.update(reservations).where(this).values(devices=one.devices))
