"""A job that is followed for real, its workload a scripted training instead of torch."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts import start
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.watch import Watcher
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadStatus
from control_plane.platform.transfer import upload
from control_plane.queue import cycle
from core import layout
from core.workload import Workload
from engine.data.packs.manifest import PackManifest
from resources.launcher import LocalGangs
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario
from tests.support.processes.workload_logs import log_of


class Scripted:
    """The local launcher, but that the agent of every workload runs the scripted training without torchrun."""

    def __init__(self, root: Path) -> None:
        self.root, self.real = root, LocalGangs(root)
        self.names: list[str] = []
        self.looked_at: Callable[[], object] = lambda: None

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        self.names.append(workload.name)
        return self.real.start_or_adopt(replace(workload, command=("tests.support.processes.scripted_agent",)), token=token)

    def get(self, name: str) -> WorkloadStatus:
        self.looked_at()
        return self.real.get(name)

    def list(self) -> Sequence[WorkloadStatus]:
        return self.real.list()

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        return self.real.stop(name, grace_s=grace_s)

    def read_log(self, name: str) -> bytes:
        return log_of(self.root, name)

    def forget(self, name: str) -> None:
        self.real.forget(name)


@dataclass
class Job:
    platform: Platform
    tenant: str
    id: str
    launcher: Scripted
    said: list[str] = field(default_factory=list)

    @property
    def work_dir(self) -> Path:
        return self.platform.settings.job_dir(self.id)

    def claim(self) -> Claim:
        cycle.run_cycle(self.platform)
        return attempts.claim(self.platform, self.tenant, self.id)

    def follow(self, held: Claim, *, answers: Callable[[], bool] = lambda: True, timeout_s: float = 120.0) -> Ending:
        """Start the workload as the step does, and watch it as the worker does until the attempt has ended; `answers`: whether the API
        does."""
        unbegun = start.start_or_adopt(self.platform, self.launcher, held)
        if unbegun is not None:
            attempts.finish(self.platform, held, unbegun)
            return unbegun
        watcher = Watcher(platform=self.platform, launcher=self.launcher, answers=answers)
        deadline = time.monotonic() + timeout_s
        while not (ended := watcher.look()):
            assert time.monotonic() < deadline, self.launcher.read_log(held.workload).decode()
            time.sleep(0.05)
        watcher.settle()
        watcher.close()
        return ended[0]

    def run(self) -> JobState:
        """One attempt from its reservation to its end; returns the state of the job."""
        held = self.claim()
        return attempts.finish(self.platform, held, self.follow(held))

    def train(self, scenario: Scenario) -> tuple[Ending, JobState]:
        scenario.write(self.work_dir)
        if scenario.each_stored:
            self.launcher.looked_at = lambda: (self.work_dir / "stored").write_text(str(max(self.steps(), default=0)))
        held = self.claim()
        ending = self.follow(held)
        return ending, attempts.finish(self.platform, held, ending)

    def following(self, scenario: Scenario) -> tuple[Claim, threading.Thread, list[Ending]]:
        """Follow in a thread, as a step does, while the test does something to it."""
        scenario.write(self.work_dir)
        held, endings = self.claim(), list[Ending]()
        thread = threading.Thread(target=lambda: endings.append(self.follow(held)), daemon=True)
        thread.start()
        return held, thread, endings

    def on_another_machine(self, root: Path) -> Job:
        """The same job where nothing of it is on the disk."""
        settings = replace(self.platform.settings, home=root)
        return Job(replace(self.platform, settings=settings), self.tenant, self.id, Scripted(root / "work" / "launcher"))

    def steps(self) -> list[int]:
        return [row.step for row in attempts.committed(self.platform, self.id)]

    def events(self, *codes: str) -> list[Any]:
        query = sa.select(job_events).where(job_events.c.job_id == self.id, job_events.c.code.in_(codes)).order_by(job_events.c.seq)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query).all())

    def from_steps(self) -> list[int | None]:
        query = sa.select(attempts_table.c.from_step).where(attempts_table.c.job_id == self.id).order_by(attempts_table.c.attempt)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query).scalars())

    def stored(self) -> set[str]:
        """Steps of which any object is in the store."""
        prefix = f"{layout.job_prefix(self.tenant, self.id)}/checkpoints"
        return {info.key.split("/")[-2] for info in self.platform.objects.list(prefix)}

    def weights(self) -> bytes:
        row = next(r for r in attempts.committed(self.platform, self.id) if r.final)
        return self.platform.objects.get_bytes(f"{row.object_prefix}/adapter_model.safetensors")


def until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def store_pack(platform: Platform, tenant: str, fingerprint: str) -> None:
    """A pack of no rows: the scripted training reads none."""
    fields: dict[str, Any] = dict.fromkeys(("num_examples", "num_windows", "num_tokens", "num_trained_tokens", "truncated"), 0)
    fields |= {"shards": [], "settings": {}, "dropped": {}, "dropped_rows": {}, "lengths": {}, "rows": {}}
    fields |= {"tokenizer_digest": "0", "template_digest": "0", "dataset_id": SPEC.dataset_id}
    directory = platform.settings.home / "pack"
    directory.mkdir()
    PackManifest(fingerprint=fingerprint, max_seq_len=128, fill=1.0, validation=None, **fields).write(directory)
    upload(platform.objects, directory, layout.pack_prefix(tenant, fingerprint))


def plain_weights(steps: int) -> bytes:
    """What the scripted training ends with when nothing interrupts it."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return (state * (Scenario.size // 64 + 1)).encode()
