"""The mix of work: tenants, jobs of several methods and sizes, each equal to an undisturbed twin, and uploads that must be refused."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import openai
import sqlalchemy as sa

from benchmarks.local_stack import Stack
from control_plane.datasets.tables import files
from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import FINAL
from ft_client.demo import tickets
from tests.journey.method_rows import rows_for

Answer = TypeVar("Answer")

TENANTS = {"free": "free", "standard": "standard", "premium": "premium"}
BACKLOG = 6
"""Unfinished jobs at any time: two more than the stack has slots, so that a premium one finds them taken."""
LONG_S = 36_000.0
"""Estimate that jobs of lower tiers are given, so that a premium job may stop them: a job that is nearly done is never stopped."""
BAD_SHARE = 0.25
"""Bad uploads per job."""
SKIP = ("golden", "task", "perplexity", "capability", "safety", "judge", "regression")
"""Evaluations of a job that are left out."""
RETRY_S = 1.0
ACCEPT_LIMIT_S = 900.0
BAD: Mapping[str, bytes] = {
    "broken.jsonl": b'{"messages": [{"role": "user", "content": "hi"}\n' * 120,
    "other.jsonl": b'{"question": "hi", "reply": 3}\n' * 120,
    "binary.jsonl": bytes(range(256)) * 400,
    "empty.jsonl": b"\n",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    method: str
    adapter: str
    rows: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.adapter}-{self.rows}"


SPECS = (
    JobSpec(method="sft", adapter="lora", rows=120, steps=24),
    JobSpec(method="dpo", adapter="lora", rows=120, steps=12),
    JobSpec(method="sft", adapter="full", rows=120, steps=16),
    JobSpec(method="kto", adapter="lora", rows=120, steps=12),
    JobSpec(method="sft", adapter="lora", rows=240, steps=48),
    JobSpec(method="cpt", adapter="lora", rows=120, steps=20),
)


@dataclass(kw_only=True)
class Load:
    stack: Stack
    rng: random.Random
    specs: Sequence[JobSpec]
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)
    accepted: dict[str, JobSpec] = field(default_factory=dict)
    twins: dict[str, str] = field(default_factory=dict)
    """By name of the spec: the job that trained it before the first fault."""
    bad: dict[str, str] = field(default_factory=dict)
    """By file: why it must be refused."""
    refused: int = 0
    breaches: list[str] = field(default_factory=list)
    _numbers: int = 0

    def prepare(self) -> None:
        for tenant, tier in TENANTS.items():
            key = self.stack.create_tenant(tenant, tier=tier)
            self.stack.ft("admin", "tenants", "update", tenant, "--max-jobs", "60", "--hard-gpu-hours", "100000")
            self.clients[tenant] = openai.OpenAI(base_url=f"{self.stack.api}/v1", api_key=key, max_retries=0, timeout=30.0)

    def train_twins(self) -> None:
        """Train each spec once; raises where one fails, which no fault has caused."""
        for spec in self.specs:
            self.twins[spec.name] = self.submit(spec)
        deadline = time.monotonic() + 300.0 * len(self.specs)
        while left := self.unfinished():
            if time.monotonic() > deadline:
                raise TimeoutError(f"twins are not trained within {300 * len(self.specs)} s: {left}")
            time.sleep(1.0)

    def run(self, stop: threading.Event) -> None:
        """Keep :data:`BACKLOG` jobs unfinished until `stop` is set."""
        while not stop.wait(RETRY_S):
            try:
                self._lengthen()
                if len(self.unfinished()) >= BACKLOG:
                    continue
                if self.rng.random() < BAD_SHARE:
                    self.upload_bad()
                self.submit(self.rng.choice(self.specs))
            except sa.exc.DBAPIError:
                continue
            except (TimeoutError, openai.APIStatusError) as e:
                self.breaches.append(f"{time.strftime('%H:%M:%S')} {e}")

    def submit(self, spec: JobSpec) -> str:
        tenant = "premium" if spec.adapter == "full" else self.rng.choice(list(TENANTS))  # no other tier trains whole models
        number = self._next_number()
        file = self._until_accepted(lambda: self._upload(tenant, spec))
        name = "supervised" if spec.method == "sft" else spec.method
        parameters = {"n_epochs": 8, "max_steps": spec.steps, "batch_size": 2, "checkpoint_every_steps": 4}
        extra = {
            "adapter": spec.adapter, "auto_promote": False, "force": True,
            "eval_config": {"skip": list(SKIP), "capability": [], "max_items": 2, "max_new_tokens": 2},
        }  # fmt: skip
        asked: Any = {"type": name, name: {"hyperparameters": parameters}}
        job = self._until_accepted(
            lambda: self.clients[tenant].fine_tuning.jobs.create(
                model="demo-llama-3m", training_file=file, seed=7, suffix=f"s{number}", method=asked, extra_body=extra,
                extra_headers={"Idempotency-Key": f"soak-{number}"},
            ).id
        )  # fmt: skip
        self.accepted[job] = spec
        return job

    def upload_bad(self) -> None:
        tenant, name = self.rng.choice(list(TENANTS)), self.rng.choice(list(BAD))
        try:
            file = self._until_accepted(lambda: self.clients[tenant].files.create(file=(name, BAD[name]), purpose="fine-tune"))
        except openai.APIStatusError:
            self.refused += 1
        else:
            self.bad[file.id] = name

    def unfinished(self) -> dict[str, str]:
        with self.stack.engine.connect() as conn:
            return {r.id: r.state for r in conn.execute(sa.select(jobs.c.id, jobs.c.state).where(jobs.c.state.not_in(FINAL)))}

    def open_files(self) -> int:
        with self.stack.engine.connect() as conn:
            return int(conn.execute(sa.select(sa.func.count()).select_from(files).where(files.c.status == "uploaded")).scalar_one())

    def _lengthen(self) -> None:
        """Jobs of seconds say that they take hours, so that a premium job, whose estimate stays its own, stops them."""
        long = (jobs.c.tier != "premium") & (jobs.c.expected_s < LONG_S) & jobs.c.state.not_in(FINAL)
        with self.stack.engine.begin() as conn:
            conn.execute(sa.update(jobs).where(long).values(expected_s=LONG_S))

    def _upload(self, tenant: str, spec: JobSpec) -> str:
        source = Path(self.stack.home).parent / "tickets.jsonl"
        if not source.exists():
            source.write_text("".join(tickets.files()[tickets.TICKETS].splitlines(keepends=True)[: max(s.rows for s in self.specs)]))
        rows = "".join(json.dumps(row) + "\n" for row in rows_for(spec.method, source)[: spec.rows])
        return self.clients[tenant].files.create(file=(f"{spec.name}.jsonl", rows.encode()), purpose="fine-tune").id

    def _until_accepted(self, call: Callable[[], Answer]) -> Answer:
        """Repeat `call` through outages. Raises what the platform refuses, and TimeoutError once it has been out for long."""
        deadline = time.monotonic() + ACCEPT_LIMIT_S
        while True:
            try:
                return call()
            except openai.APIError as e:
                status = getattr(e, "status_code", 503)
                if status < 500 and status not in (408, 409, 429):
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the API accepted no request for {ACCEPT_LIMIT_S:.0f} s: {e}") from e
            time.sleep(RETRY_S)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
