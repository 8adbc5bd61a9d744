"""Every process of a running stack, killed and stopped in turn while jobs run: what notices, what comes back, what is lost.

    python -m benchmarks.recovery [--home DIR] [--only NAME ...] [--out benchmarks/recovery_cpu_202611.json]

The services are those that the running stack reports, so a service of a later version is killed as well. A killed supervisor is
followed by ``ft up``, as systemd does it. All jobs train the same rows with the same seed: they must end with the same bytes.
Cases that are done are kept in the home: started again, the benchmark goes on with the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.recovery.processes import WORK, Processes
from benchmarks.scheduler.live import SKIP, Stack, stack
from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import attempts, checkpoints
from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import FINAL
from control_plane.platform.settings import load as load_settings
from ft_assets.demo import tickets
from resources.database.engine import dagster_url, make_engine

STEPS, ROWS = 40, 120
LOOK_S = 0.1
CASE_S = 400.0
"""Seconds that one case may take on a machine that others use too."""
TENANT = "recovery"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path("/tmp/ft-recovery"))
    parser.add_argument("--only", action="append", default=[], help="names of processes; default: all that the stack reports")
    parser.add_argument("--budget-s", type=float, default=7200.0, help="no case begins later than this; the running jobs are awaited")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with stack(given.home) as running:
        dagster = make_engine(dagster_url(load_settings(running.env)))
        trial = Trial(stack=running, processes=Processes(home=running.home), dagster=dagster)
        trial.run(given.only, until=time.monotonic() + given.budget_s)
        result = trial.result()
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
        given.out.with_suffix(".md").write_text(as_markdown(result))
    raise SystemExit(1 if result["breaches"] else 0)


@dataclass(kw_only=True)
class Trial:
    stack: Stack
    processes: Processes
    dagster: sa.Engine
    client: openai.OpenAI | None = None
    file: str = ""
    doubled: set[str] = field(default_factory=set)

    def run(self, only: Sequence[str], *, until: float) -> None:
        self._prepare()
        done = {(c["process"], c["signal"]) for c in self._cases()}
        services = list(self.processes.services())
        cases = [(name, "SIGKILL") for name in (*WORK, *services)] + [(n, "SIGSTOP") for n in services if n != "supervisor"]
        for name, signame in cases:
            if (name, signame) in done or (only and name not in only) or time.monotonic() > until:
                continue
            case = self._case(name, signal.Signals[signame])
            with (self.stack.home / "recovery.jsonl").open("a") as f:
                f.write(json.dumps(case) + "\n")
            print(time.strftime("%H:%M:%S"), case, flush=True)
        self._await("all jobs to end", lambda: not self._unfinished(), 1800.0)

    def _case(self, name: str, signum: signal.Signals) -> dict[str, Any]:
        self._await("the stack to be ready", self.processes.is_ready)
        self._train()
        victims = self.processes.of_jobs().get(name)
        if victims is None:
            pid, works_for = self.processes.services()[name], ""
        else:
            self._await(f"a {name}", lambda: bool(self.processes.of_jobs()[name]))
            pid, works_for = next(iter(self.processes.of_jobs()[name].items()))
        services, logs = self.processes.services(), self._log_sizes()
        before, ended = set(self.processes.of_jobs().get(name, {})), self._ended_attempts()
        killed_at = time.time()
        os.kill(pid, signum)
        if name in WORK:
            noticed_s, back_s = self._follow_work(
                name, killed_at, before=before, run=works_for if name == "run worker" else "", ended=ended
            )
        else:
            noticed_s, back_s = self._follow_service(name, pid, killed_at)
        gone = [other for other, p in services.items() if other != name and self.processes.services().get(other) != p]
        return {
            "process": name, "signal": signum.name, "at": killed_at, "detected_s": noticed_s, "recovered_s": back_s,
            "services_replaced_with_it": [] if name == "supervisor" else sorted(set(gone) - {"postgres server", "postgres"}),
            "log": self._new_lines(logs),
        }  # fmt: skip

    def _follow_service(self, name: str, pid: int, killed_at: float) -> tuple[float | None, float | None]:
        """Seconds until the supervisor reported it, and until the whole stack was ready again."""
        if name == "supervisor":
            subprocess.run([str(Path(sys.executable).parent / "ft"), "up", "--detach"], env=dict(self.stack.env), check=False, timeout=600)
            return None, round(time.time() - killed_at, 1) if self.processes.is_ready() else None
        noticed: float | None = None
        for after in self._seconds_since(killed_at):
            state = self.processes.service_of(name)
            if noticed is None and state and (state["state"] != "up" or self.processes.services().get(name) != pid):
                noticed = after
            if noticed is not None and state.get("state") == "up" and self.processes.is_ready():
                return noticed, after
        return noticed, None

    def _follow_work(
        self, name: str, killed_at: float, *, before: Collection[int], run: str, ended: int
    ) -> tuple[float | None, float | None]:
        """Seconds until the platform wrote down that the run or the attempt ended, and until another process did its work."""
        noticed: float | None = None
        for after in self._seconds_since(killed_at):
            with contextlib.suppress(SQLAlchemyError):
                if noticed is None and (self._run_failed(run) if run else self._ended_attempts() > ended):
                    noticed = after
                if self.processes.of_jobs()[name].keys() - before or not self._unfinished():
                    return noticed, after
        return noticed, None

    def _seconds_since(self, killed_at: float) -> Iterator[float]:
        while (after := time.time() - killed_at) < CASE_S:
            self._note_doubles(self.processes.of_jobs()["trainer"].values())
            yield round(after, 1)
            time.sleep(LOOK_S)

    def _ended_attempts(self) -> int:
        with contextlib.suppress(SQLAlchemyError), self.stack.engine.connect() as conn:
            return conn.execute(sa.select(sa.func.count()).where(attempts.c.ended_at.is_not(None))).scalar_one()
        return 0

    def _run_failed(self, run: str) -> bool:
        with self.dagster.connect() as conn:
            status = conn.execute(sa.text("SELECT status FROM runs WHERE run_id = :run"), {"run": run}).scalar_one()
        return bool(status == "FAILURE")

    def _note_doubles(self, trainers: Iterable[str]) -> None:
        """Jobs of which two attempts train at once."""
        counted = Counter(name.split("/")[0] for name in set(trainers))
        self.doubled |= {job for job, number in counted.items() if number > 1}

    def _train(self) -> None:
        """Wait for a job whose trainer runs; submit one where none is under way."""

        def training() -> bool:
            if len(self._unfinished()) == 0:
                self._submit()
            return bool(self.processes.of_jobs()["trainer"]) and any(state == "running" for state in self._unfinished().values())

        self._await("a job to train", training)

    def _submit(self) -> None:
        assert self.client is not None
        with self.stack.engine.connect() as conn:
            number = conn.execute(sa.select(sa.func.count()).select_from(jobs)).scalar_one()
        extra = {
            "method": "lora", "auto_promote": False,
            "eval_config": {"skip": SKIP, "capability": [], "max_items": 2, "max_new_tokens": 2},
            "hyperparameters": {"n_epochs": 8, "max_steps": STEPS, "batch_size": 2, "checkpoint_every_steps": 5},
        }  # fmt: skip
        self.client.fine_tuning.jobs.create(
            model="demo-llama-3m", training_file=self.file, seed=7, suffix=f"r{number}", extra_body=extra,
            extra_headers={"Idempotency-Key": f"recovery-{number}"},
        )  # fmt: skip

    def _unfinished(self) -> dict[str, str]:
        with self.stack.engine.connect() as conn:
            return {r.id: r.state for r in conn.execute(sa.select(jobs.c.id, jobs.c.state).where(jobs.c.state.not_in(FINAL)))}

    def _await(self, what: str, until: Callable[[], bool], limit_s: float = CASE_S) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(SQLAlchemyError, openai.APIError):
                if until():
                    return
            time.sleep(LOOK_S * 5)
        raise TimeoutError(f"{what}: not seen within {limit_s:.0f} s; logs are in {self.stack.home / 'logs'}")

    def _prepare(self) -> None:
        made = self.stack.home / "recovery.json"
        known: dict[str, str] = json.loads(made.read_text()) if made.exists() else {}
        if "key" not in known:
            created = self.stack.ft("admin", "tenants", "create", TENANT, "--tier", "standard", "--json").stdout
            self.stack.ft("admin", "tenants", "update", TENANT, "--hard-gpu-hours", "100000")
            known["key"] = json.loads(created)["api_key"]
        self.client = openai.OpenAI(base_url=f"{self.stack.api}/v1", api_key=known["key"], max_retries=8)
        if "file" not in known:
            rows = self.stack.home / "rows.jsonl"
            rows.write_text("".join(tickets.files()[tickets.TICKETS].splitlines(keepends=True)[:ROWS]))
            known["file"] = self.client.files.create(file=rows, purpose="fine-tune").id
        self.file = known["file"]
        made.write_text(json.dumps(known))

    def _cases(self) -> list[dict[str, Any]]:
        path = self.stack.home / "recovery.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _log_sizes(self) -> dict[Path, int]:
        return {p: p.stat().st_size for p in (self.stack.home / "logs").glob("*.log")}

    def _new_lines(self, before: Mapping[Path, int]) -> dict[str, dict[str, int]]:
        """By log: tracebacks and lines about an outage that this case has added."""
        found = {}
        for path in sorted((self.stack.home / "logs").glob("*.log")):
            with path.open("rb") as f:
                f.seek(before.get(path, 0))
                text = f.read().decode(errors="replace")
            counted = {"tracebacks": text.count("Traceback (most recent"), "outage_lines": text.count("does not answer: ")}
            if any(counted.values()):
                found[path.stem] = counted
        return found

    def result(self) -> dict[str, Any]:
        with self.stack.engine.connect() as conn:
            all_jobs = conn.execute(sa.select(jobs)).all()
            tries = conn.execute(sa.select(attempts)).all()
            finals = conn.execute(sa.select(checkpoints.c.job_id, checkpoints.c.object_prefix).where(checkpoints.c.final)).all()
            adapters_of = Counter(conn.execute(sa.select(adapters.c.job_id)).scalars())
        ledger = self.stack.ft("admin", "ledger", "check", ok=False)
        digests = {self._digest(f.object_prefix) for f in finals}
        per_job = Counter(f.job_id for f in finals)
        cases = [{**case, "lost_gpu_s": lost} for case, lost in zip(self._cases(), self._lost(tries), strict=True)]
        succeeded = Counter(a.job_id for a in tries if a.outcome == "succeeded")
        return {
            "machine": {"cores": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)},
            "steps": STEPS, "jobs": len(all_jobs), "attempts": len(tries), "outcomes": dict(Counter(str(a.outcome) for a in tries)),
            "lost_gpu_s": round(sum(a.lost_s or 0.0 for a in tries), 1),
            "lost_gpu_s_most": max((a.lost_s or 0.0 for a in tries), default=0.0),
            "ledger_check": "holds" if ledger.returncode == 0 else ledger.stdout[-500:] + ledger.stderr[-500:],
            "different_adapters": len(digests),
            "breaches": [
                *(f"job {j.id} ended as {j.state}: {j.error}" for j in all_jobs if j.state != "succeeded"),
                *(f"job {j.id} has {per_job[j.id]} finished models" for j in all_jobs if per_job[j.id] != 1),
                *(f"job {j.id} has {adapters_of[j.id]} adapters" for j in all_jobs if adapters_of[j.id] != 1),
                *(f"job {j.id} has {succeeded[j.id]} attempts that succeeded" for j in all_jobs if succeeded[j.id] != 1),
                *(f"two attempts of {job} trained at once" for job in sorted(self.doubled)),
                *([f"{len(digests)} different adapters of one seed"] if len(digests) > 1 else []),
                *(["the ledger does not hold"] if ledger.returncode else []),
                *(f"{c['process']} after {c['signal']}: not back in {CASE_S:.0f} s" for c in cases if c["recovered_s"] is None),
                *(f"{c['process']} took others with it: {c['services_replaced_with_it']}" for c in cases if c["services_replaced_with_it"]),
            ],
            "cases": cases,
        }  # fmt: skip

    def _lost(self, tries: Sequence[Any]) -> list[float]:
        """GPU-seconds of work done again, of the attempts that ended between each case and the next."""
        at = [case["at"] for case in self._cases()]
        ended = [(a.ended_at.timestamp(), a.lost_s or 0.0) for a in tries if a.ended_at]
        return [round(sum(lost for when, lost in ended if a <= when < b), 1) for a, b in zip(at, [*at[1:], float("inf")], strict=True)]

    def _digest(self, prefix: str) -> str:
        return hashlib.sha256((self.stack.home / "objects" / prefix / "adapter_model.safetensors").read_bytes()).hexdigest()


def as_markdown(result: Mapping[str, Any]) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield "# Recovery of every process of a running stack"
    yield ""
    machine = result["machine"]
    yield (
        f"`python -m benchmarks.recovery`, {machine['cores']} cores, load {machine['load_1_min']} at the end. "
        f"{result['jobs']} jobs of {result['steps']} steps, {result['attempts']} attempts ({_counts(result['outcomes'])})."
    )
    yield ""
    yield "| process | signal | detected after s | back after s | work lost, GPU-s | tracebacks | outage lines |"
    yield "|---|---|---|---|---|---|---|"
    for case in result["cases"]:
        tracebacks = sum(c["tracebacks"] for c in case["log"].values())
        outages = sum(c["outage_lines"] for c in case["log"].values())
        detected = "-" if case["detected_s"] is None else f"{case['detected_s']:.1f}"
        back = "-" if case["recovered_s"] is None else f"{case['recovered_s']:.1f}"
        yield f"| {case['process']} | {case['signal']} | {detected} | {back} | {case['lost_gpu_s']} | {tracebacks} | {outages} |"
    yield ""
    yield (
        f"Work lost: {result['lost_gpu_s']} GPU-seconds in all, {result['lost_gpu_s_most']:.1f} at most in one attempt. "
        f"Ledger: {result['ledger_check']}. Different adapters of the one seed: {result['different_adapters']}."
    )
    yield ""
    yield f"Breaches: {len(result['breaches'])}."
    yield from (f"- {breach}" for breach in result["breaches"])


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))


if __name__ == "__main__":
    main()
