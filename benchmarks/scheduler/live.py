"""Fifty small jobs of three tiers and five tenants over four slots of a real platform, with preemptions and random kills.

    python -m benchmarks.scheduler.live [--jobs 50] [--kills 16] [--seed 1] [--home DIR] [--out benchmarks/scheduler_live_202611.json]

Everything is the product's: ``ft up``, two nodes of two slots each, uploads, training processes, evaluations. What the policy takes for
long is told by hand: jobs that are not premium get an estimate of ten hours once they are packed, so that premium jobs, whose estimate
is their own, have somebody to stop. Each tenant trains the same rows with the same ten seeds, so five jobs must end with the same bytes
whatever became of them. The platform's directory is kept: started again with the same ``--home``, the trial goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import sqlalchemy as sa

from benchmarks.scheduler.live_checks import Evidence, examine
from benchmarks.soak.processes import Processes
from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import FINAL
from control_plane.platform.settings import load as load_settings
from ft_assets.demo import tickets
from resources.database.engine import control_plane_url, make_engine
from tests.support.servers.inference_server import free_port

ROOT = Path(__file__).resolve().parents[2]
TENANTS = {"free-a": "free", "free-b": "free", "standard-a": "standard", "standard-b": "standard", "premium-a": "premium"}
POOLS = """\
pools:
  - name: local
    gpu_type: local
    takes: [lora, large, full]
    packing: dense
    max_gpus_per_job: 2
    nodes: [{name: left, gpus: 2}, {name: right, gpus: 2}]
"""
SLOTS = 4
STEPS = 20
ROWS = 120
"""A dataset that is trained on has a hundred at least."""
LONG_S = 36_000.0
"""The estimate of what may be stopped: the policy stops nobody who has less than a quarter of an hour left."""
LOOK_S = 0.5
SUBMIT_EVERY_S = (0.5, 6.0)
VICTIMS_FIRST = 2
"""Jobs that must train and may be stopped before a premium one is submitted."""
PATIENCE_S = 3600.0
VICTIMS = {"trainer": 5, "run worker": 5, "watcher": 2, "daemon": 1, "runs": 1}
"""How often each kind of process is chosen."""
SKIP = ["golden", "task", "perplexity", "capability", "safety", "judge", "regression"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", type=Path, default=Path("/tmp/ft-scheduler-live"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started here is ended here
    with stack(given.home) as running:
        trial = Trial(stack=running, rng=random.Random(given.seed), num_jobs=given.jobs, num_kills=given.kills)
        trial.run()
        result = {"seed": given.seed, "slots": SLOTS, "steps": STEPS, **examine(trial.evidence())}
        ledger = running.ft("admin", "ledger", "check", ok=False)
        result["ledger_check"] = "holds" if ledger.returncode == 0 else ledger.stdout[-500:]
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    raise SystemExit(1 if result["breaches"] else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    home: Path
    env: Mapping[str, str]
    api: str
    engine: sa.Engine

    def ft(self, *args: str, key: str = "", ok: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**self.env, **({"FT_API_KEY": key} if key else {})}
        done = subprocess.run([_ft(), *args], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
        if ok and done.returncode:
            raise RuntimeError(f"ft {' '.join(args)}: {done.stdout}{done.stderr}")
        return done


def _ft() -> str:
    return str(Path(sys.executable).parent / "ft")


@contextlib.contextmanager
def stack(home: Path, extra: Mapping[str, str] = MappingProxyType({})) -> Iterator[Stack]:
    """The whole platform in `home`, started anew with `extra` variables; ended with this process."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "pools.yaml").write_text(POOLS)
    ports_file = home / "ports.json"
    if not ports_file.exists():
        ports_file.write_text(json.dumps({n: str(free_port()) for n in ("FT_API_PORT", "FT_DAGSTER_PORT", "FT_INFERENCE_PORT")}))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_"))}
    env = {**kept, **json.loads(ports_file.read_text()), "FT_HOME": str(home / "ft"), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    env |= {"FT_POOLS": str(home / "pools.yaml"), "FT_MLFLOW_URI": "off", "PYTHONPATH": str(ROOT), **extra}
    subprocess.run([_ft(), "down"], env=env, cwd=ROOT, capture_output=True, timeout=170, check=False)
    settings = load_settings(env)
    try:
        up = subprocess.run([_ft(), "up", "--detach"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if up.returncode:
            raise RuntimeError(f"ft up: {up.stdout}{up.stderr}")
        engine = make_engine(control_plane_url(settings))
        api = json.loads((settings.home / "endpoints.json").read_text())["api"]
        yield Stack(home=settings.home, env=env, api=api, engine=engine)
        engine.dispose()
    finally:
        subprocess.run([_ft(), "down"], env=env, cwd=ROOT, capture_output=True, timeout=170, check=False)


@dataclass(kw_only=True)
class Trial:
    stack: Stack
    rng: random.Random
    num_jobs: int
    num_kills: int
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Submit, kill and look on until every job has ended."""
        self._prepare()
        left, done = self._left(), 0
        last = next_submit = time.monotonic()
        next_kill = last + 40.0
        kills = self.num_kills - len(self._noted("kills"))
        while left or done < self.num_jobs:
            if time.monotonic() - last > PATIENCE_S:
                raise TimeoutError(f"no job ended within {PATIENCE_S:.0f} s: {self._states()}")
            now = time.monotonic()
            if now >= next_submit and (chosen := self._next(left)) is not None:
                left.remove(chosen)
                self._submit(*chosen)
                next_submit = now + self.rng.uniform(*SUBMIT_EVERY_S)
            if kills > 0 and now >= next_kill and self._kill():
                kills, next_kill = kills - 1, now + self.rng.uniform(15.0, 60.0)
            self._lengthen()
            self._sample()
            ended = sum(n for state, n in self._states().items() if state in FINAL)
            if ended > done:
                last, done = now, ended
                print(f"{time.strftime('%H:%M:%S')} {self._states()} kills left {kills}", flush=True)
            time.sleep(LOOK_S)

    def evidence(self) -> Evidence:
        return Evidence(engine=self.stack.engine, home=self.stack.home, slots=SLOTS, kills=self._noted("kills"), seen=self._noted("seen"))

    def _prepare(self) -> None:
        """Tenants, keys and files; those that are there stay."""
        made = self.stack.home / "live.json"
        known: dict[str, Any] = json.loads(made.read_text()) if made.exists() else {}
        rows = self.stack.home / "rows.jsonl"
        if not rows.exists():
            rows.write_text("".join(tickets.files()[tickets.TICKETS].splitlines(keepends=True)[:ROWS]))
        for tenant, tier in TENANTS.items():
            if tenant not in known:
                key = json.loads(self.stack.ft("admin", "tenants", "create", tenant, "--tier", tier, "--json").stdout)["api_key"]
                self.stack.ft("admin", "tenants", "update", tenant, "--max-jobs", "60", "--hard-gpu-hours", "100000")
                known[tenant] = {"key": key}
            self.clients[tenant] = openai.OpenAI(base_url=f"{self.stack.api}/v1", api_key=known[tenant]["key"], max_retries=8)
            if "file" not in known[tenant]:
                known[tenant]["file"] = self.clients[tenant].files.create(file=rows, purpose="fine-tune").id
            self.files[tenant] = known[tenant]["file"]
            made.write_text(json.dumps(known))

    def _left(self) -> list[tuple[str, int]]:
        """Tenant and seed of each job that is not submitted yet, in an order of chance."""
        planned = [(tenant, seed) for seed in range(-(-self.num_jobs // len(TENANTS))) for tenant in TENANTS][: self.num_jobs]
        with self.stack.engine.connect() as conn:
            there = {(r.tenant_id, r.seed) for r in conn.execute(sa.select(jobs.c.tenant_id, jobs.c.seed))}
        left = [p for p in planned if p not in there]
        self.rng.shuffle(left)
        return left

    def _next(self, left: list[tuple[str, int]]) -> tuple[str, int] | None:
        """The next job to submit; a premium one waits until there is somebody whom it could stop."""
        others = [p for p in left if p[0] != "premium-a"]
        stoppable = (jobs.c.state == "running") & (jobs.c.tier != "premium") & (jobs.c.preemptions == 0)
        with self.stack.engine.connect() as conn:
            victims = conn.execute(sa.select(sa.func.count()).select_from(jobs).where(stoppable)).scalar_one()
        allowed = left if victims >= VICTIMS_FIRST or not others else others
        return allowed[0] if allowed else None

    def _submit(self, tenant: str, seed: int) -> None:
        extra = {
            "method": "lora", "auto_promote": False,
            "eval_config": {"skip": SKIP, "capability": [], "max_items": 2, "max_new_tokens": 2},
            "hyperparameters": {"n_epochs": 8, "max_steps": STEPS, "batch_size": 2, "checkpoint_every_steps": 5},
        }  # fmt: skip
        self.clients[tenant].fine_tuning.jobs.create(
            model="demo-llama-3m", training_file=self.files[tenant], seed=seed, suffix="live", extra_body=extra
        )

    def _lengthen(self) -> None:
        long = (jobs.c.tier != "premium") & (jobs.c.expected_s < LONG_S) & jobs.c.state.in_(["queued", "provisioning", "running"])
        with self.stack.engine.begin() as conn:
            conn.execute(sa.update(jobs).where(long).values(expected_s=LONG_S))

    def _states(self) -> dict[str, int]:
        with self.stack.engine.connect() as conn:
            rows = conn.execute(sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)).all()
        return {str(state): int(count) for state, count in rows}

    def _kill(self) -> bool:
        kind = self.rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        running = Processes(home=self.stack.home)
        found = sorted(running.of_jobs().get(kind, ())) or [pid for name, pid in running.services().items() if name == kind]
        if not found:
            return False
        victim = self.rng.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            self._note("kills", {"time": time.time(), "kind": kind, "pid": victim})
            print(f"{time.strftime('%H:%M:%S')} kill -9 {kind}", flush=True)
        return True

    def _sample(self) -> None:
        """Which workloads have a training process at this moment."""
        names = {"/".join(name.rsplit("-", 1)) for name in Processes(home=self.stack.home).of_jobs()["trainer"].values()}
        self._note("seen", {"time": time.time(), "training": sorted(names)})

    def _note(self, kind: str, line: Mapping[str, Any]) -> None:
        with (self.stack.home / f"live-{kind}.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")

    def _noted(self, kind: str) -> list[dict[str, Any]]:
        path = self.stack.home / f"live-{kind}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
