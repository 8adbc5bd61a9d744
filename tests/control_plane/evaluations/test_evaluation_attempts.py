"""Attempts of evaluations: started, adopted, gone on with, given up, billed; the process a scripted one."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import psutil
import pytest
import sqlalchemy as sa
import yaml

from agent.messages import MILESTONE, Commit, Exit, Heartbeat, Notice, WriteRequest
from control_plane.attempts import agents
from control_plane.attempts.tables import agents as agents_table
from control_plane.attempts.tables import checkpoints
from control_plane.billing import ledger
from control_plane.billing.tables import ledger_entries, meter_events
from control_plane.evaluations import evaluation_workload as workloads
from control_plane.jobs.service import cancel
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase
from control_plane.quotas.tables import quota_holds
from control_plane.tenants.rules import Tenant
from core import layout
from core.base_models import Catalogue
from core.errors import Conflict, Forbidden, FtError, IntegrityError, InvalidRequest, NotAdmitted
from engine.evals.run import run_file, run_status
from ft_assets.evals import step
from ft_assets.evals.assets import eval_report
from ft_assets.platform_resource import PlatformResource
from tests.engine.evals.suites.test_task_files import write_suite
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_evaluations import Following, following, out_dir
from tests.support.jobs.followed_jobs import Scripted, until
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.scripted_agent import LIMITS
from tests.support.processes.scripted_evaluation import GO, HOLD, STARTS, STEPS, SUITES


@pytest.fixture(scope="module")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("real") / "tiny-base")


@pytest.fixture
def platform(fresh_platform: Platform, real_base: Path) -> Platform:
    entry = {"id": "tiny-base", "path": str(real_base), "license": "Apache-2.0"}
    return replace(fresh_platform, models=Catalogue({"tiny-base": (entry, real_base)}))


@dataclass
class Evaluated:
    """A trained job whose evaluation is carried out by a scripted process."""

    following: Following
    tenant: str
    id: str

    @property
    def platform(self) -> Platform:
        return self.following.platform

    @property
    def job_dir(self) -> Path:
        return self.platform.settings.job_dir(self.id)

    def tell(self, name: str, text: str = "") -> None:
        self.job_dir.mkdir(parents=True, exist_ok=True)
        (self.job_dir / name).write_text(text)

    def evaluate(self) -> step.Evaluated:
        return self.following.evaluate(self.tenant, self.id)

    def pids(self) -> list[int]:
        path = self.job_dir / STARTS
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def outcomes(self) -> list[str | None]:
        return self.following.outcomes(self.id)

    def events(self) -> list[str]:
        query = sa.select(job_events.c.code).where(job_events.c.job_id == self.id, job_events.c.code.startswith("evaluation_"))
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query.order_by(job_events.c.seq)).scalars())

    def ledger(self) -> list[tuple[int, str]]:
        query = sa.select(ledger_entries.c.attempt, ledger_entries.c.kind).where(ledger_entries.c.job_id == self.id)
        with self.platform.engine.connect() as conn:
            return sorted((row.attempt, row.kind) for row in conn.execute(query))

    def column(self, name: str) -> object:
        with self.platform.engine.connect() as conn:
            return conn.execute(sa.select(jobs.c[name]).where(jobs.c.id == self.id)).scalar_one()


@pytest.fixture
def job(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> Iterator[Evaluated]:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows())
    with following(platform, Scripted(platform.settings.work_dir / "launcher")) as made:
        yield Evaluated(following=made, tenant=tenant.id, id=job_id)


def test_the_report_is_of_the_result_and_what_the_process_did_is_told_once(job: Evaluated) -> None:
    job.tell(GO)
    evaluated = job.evaluate()
    assert evaluated.report.adapter_applied
    assert job.events() == ["evaluation_started", "evaluation_progress"]
    assert job.evaluate() == evaluated, "a step that is replaced makes the same report again"
    assert (len(job.pids()), job.events()) == (1, ["evaluation_started", "evaluation_progress"])
    assert job.outcomes() == ["succeeded"]


def test_a_report_is_materialized_with_its_tables_cost_and_links(
    job: Evaluated, real_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.tell(GO)
    evaluated = job.evaluate()
    models = tmp_path / "models.yaml"
    models.write_text(yaml.safe_dump({"models": [{"id": "tiny-base", "path": str(real_base), "license": "Apache-2.0"}]}))
    settings = job.platform.settings
    for name, value in (("HOME", str(settings.home)), ("DATABASE_URL", settings.database_url), ("BASE_MODELS", str(models))):
        monkeypatch.setenv(f"FT_{name}", value)
    partition = f"{job.tenant}:{job.id}"
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("jobs", [partition])
        result = dg.materialize([eval_report], instance=instance, partition_key=partition, resources={"platform": PlatformResource()})
    (made,) = result.asset_materializations_for_node("eval_report")
    seen = {name: value.value for name, value in made.metadata.items()}
    assert [record.data["metric"] for record in seen["score_table"].records] == [score.metric for score in evaluated.report.scores]
    assert {record.data["rule"] for record in seen["gate_table"].records} == {finding.rule for finding in evaluated.verdict.findings}
    assert seen["cost_usd"] == ledger.cost_of_job(job.platform, job.id) / 1e6 > 0
    assert seen["runs_of_job"].endswith(job.id)
    assert seen["made_from_checkpoint"].startswith("/assets/checkpoint?partition=")
    assert seen["samples"].endswith("samples.jsonl")


@pytest.mark.slow
def test_how_much_is_asked_is_told_before_the_process_says_so(job: Evaluated) -> None:
    job.tell(HOLD)
    step_ = threading.Thread(target=job.evaluate, daemon=True)
    step_.start()
    until(lambda: job.pids())
    progress = job.column("evaluation")
    assert isinstance(progress, dict)
    assert progress["total"] > 0
    assert progress["done"] == 0
    job.tell(GO)
    (job.job_dir / HOLD).unlink()
    step_.join(timeout=30)
    assert job.outcomes() == ["succeeded"]


def test_a_stored_result_that_was_changed_is_refused(job: Evaluated) -> None:
    job.tell(GO)
    job.evaluate()
    key = f"{layout.attempt_prefix(job.tenant, job.id, 1)}/outputs/{run_file.RESULT_NAME}"
    job.platform.objects.put_bytes(key, b"{}")
    with pytest.raises(IntegrityError, match="is not the result that was stored"):
        step.evaluate(job.platform, job.following.launcher, job.tenant, job.id)


def test_nothing_is_evaluated_without_a_reservation(job: Evaluated) -> None:
    with pytest.raises(NotAdmitted, match="holds no reservation for this evaluation"):
        step.evaluate(job.platform, job.following.launcher, job.tenant, job.id)
    assert job.pids() == []


@pytest.mark.slow
def test_a_process_that_stands_still_is_replaced_and_at_last_given_up(job: Evaluated) -> None:
    job.tell(LIMITS, json.dumps({"stall_s": 0.3}))
    with pytest.raises(FtError):
        job.evaluate()
    assert job.outcomes() == ["evaluation_stalled"] * 3
    assert len(job.pids()) == 3
    assert job.following.state(job.tenant, job.id) is JobState.FAILED
    error = job.following.error(job.id)
    assert error["code"] == "evaluation_stalled"
    assert "gave no answer and generated nothing for 0.005 min, with 0 of 1 requests answered (base, golden)" in error["message"]
    assert job.ledger() == sorted((n, kind) for n in (1, 2, 3) for kind in ("usage", "refund")), "the platform's fault is refunded"


def test_a_process_that_generates_is_not_stopped_before_its_batch_is_answered(job: Evaluated) -> None:
    job.tell(LIMITS, json.dumps({"stall_s": 1.5}))
    job.tell(STEPS)
    step_ = threading.Thread(target=job.evaluate, daemon=True)
    step_.start()
    until(lambda: job.events())
    time.sleep(4.0)
    job.tell(GO)
    step_.join(timeout=60)
    assert job.outcomes() == ["succeeded"]


@pytest.mark.slow
def test_a_process_that_is_frozen_is_replaced(job: Evaluated) -> None:
    settings = replace(job.platform.settings, heartbeat_timeout_s=6.0)
    job.following.platform = replace(job.platform, settings=settings)

    def freeze_the_first() -> None:
        until(lambda: job.events())
        os.kill(job.pids()[0], signal.SIGSTOP)
        until(lambda: len(job.pids()) == 2)
        job.tell(GO)

    freezer = threading.Thread(target=freeze_the_first)
    freezer.start()
    job.evaluate()
    freezer.join()
    assert job.outcomes() == ["evaluation_stalled", "succeeded"]
    assert "evaluation_stalled" in str(job.following.failures[0])


def test_an_evaluation_that_has_had_its_time_is_ended(job: Evaluated) -> None:
    job.tell(LIMITS, json.dumps({"total_s": 0.5}))
    with pytest.raises(FtError):
        job.evaluate()
    assert job.outcomes() == ["evaluation_timed_out"]
    error = job.following.error(job.id)
    assert error["code"] == "evaluation_timed_out"
    assert re.search(r"with 0 of . requests answered.*; what was answered is kept; lower capability_limit", error["message"])
    assert job.ledger() == [(1, "usage")]


@pytest.mark.slow
def test_a_process_that_runs_is_adopted(job: Evaluated) -> None:
    found: list[step.Evaluated] = []
    steps = [threading.Thread(target=lambda: found.append(job.evaluate()), daemon=True) for _ in range(2)]
    steps[0].start()
    until(lambda: job.pids())
    steps[1].start()
    job.tell(GO)
    for each in steps:
        each.join(timeout=30)
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(job.pids()) == 1


@pytest.mark.slow
def test_a_workload_whose_next_step_refuses_ends_before_its_gpu_is_given_back(job: Evaluated) -> None:
    stopped: list[FtError] = []

    def first_step() -> None:
        with pytest.raises(FtError) as ended:
            step.evaluate(job.platform, job.following.launcher, job.tenant, job.id)
        stopped.append(ended.value)

    assert job.following.reserve(job.tenant, job.id) is not None
    first = threading.Thread(target=first_step, daemon=True)
    first.start()
    until(lambda: job.events())
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(checkpoints).where(checkpoints.c.job_id == job.id).values(final=False))
    with pytest.raises(Conflict, match="no finished adapter"):
        step.evaluate(job.platform, job.following.launcher, job.tenant, job.id)
    status = job.following.launcher.get(f"{job.id}-a1")
    assert status.phase is WorkloadPhase.EXITED
    assert not psutil.pid_exists(job.pids()[0])
    first.join(timeout=30)
    assert len(stopped) == 1
    ended_at = sa.select(meter_events.c.at).where(meter_events.c.job_id == job.id, meter_events.c.kind == "ended")
    with job.platform.engine.connect() as conn:
        assert conn.execute(ended_at).scalar_one().timestamp() == pytest.approx(status.ended_at)
    assert job.ledger() == [(1, "refund"), (1, "usage")]


@pytest.mark.parametrize("whom", ["process", pytest.param("agent", marks=pytest.mark.slow)])
def test_what_is_killed_is_followed_by_another_attempt_whose_time_alone_is_billed(job: Evaluated, whom: str) -> None:
    def kill_the_first() -> None:
        until(lambda: job.events())
        process = psutil.Process(job.pids()[0])
        agent = process.parent()
        assert agent is not None
        os.kill(process.pid if whom == "process" else agent.pid, signal.SIGKILL)
        until(lambda: len(job.pids()) == 2)
        job.tell(GO)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    job.evaluate()
    killer.join()
    assert job.outcomes() == ["evaluation_failed", "succeeded"]
    assert job.events() == ["evaluation_started", "evaluation_progress"], "each milestone once"
    assert job.ledger() == [(1, "refund"), (1, "usage"), (2, "usage")]


@pytest.mark.slow
@pytest.mark.parametrize("code", [run_status.EXIT_STOPPED, run_status.EVAL_EXIT_INTERNAL])
def test_what_fails_again_and_again_is_given_up(job: Evaluated, code: int) -> None:
    job.tell(GO, str(code))
    with pytest.raises(FtError):
        job.evaluate()
    assert job.outcomes() == ["evaluation_failed"] * 3
    assert job.following.error(job.id)["code"] == "evaluation_failed"
    assert job.following.state(job.tenant, job.id) is JobState.FAILED


def test_a_process_that_refuses_its_input_is_not_started_again(job: Evaluated) -> None:
    job.tell(GO, str(run_status.EVAL_EXIT_BAD_INPUT))
    with pytest.raises(FtError):
        job.evaluate()
    assert job.outcomes() == ["bad_run_file"]
    assert job.following.error(job.id)["message"].endswith("refused")
    assert job.ledger() == [(1, "usage")]


@pytest.mark.slow
def test_a_node_that_takes_its_workloads_back_does_not_count_against_the_evaluation(job: Evaluated) -> None:
    def take_back() -> None:
        for n in range(4):
            until(lambda n=n: len(job.pids()) == n + 1 and (out_dir(job.platform, job.id) / run_file.HEARTBEAT_NAME).exists())
            job.following.launcher.stop(f"{job.id}-a{n + 1}", grace_s=10.0)
        until(lambda: len(job.pids()) == 5)
        job.tell(GO)

    node = threading.Thread(target=take_back)
    node.start()
    job.evaluate()
    node.join()
    assert job.outcomes() == ["preempted"] * 4 + ["succeeded"]
    assert [error.code for error in job.following.failures] == ["attempt_stopped"] * 4, "none of its runs failed"


@pytest.mark.slow
def test_a_process_whose_result_nobody_wants_is_ended(job: Evaluated) -> None:
    def cancel_it() -> None:
        until(lambda: job.pids())
        cancel(job.platform, job.tenant, job.id)

    canceller = threading.Thread(target=cancel_it)
    canceller.start()
    with pytest.raises(FtError) as stopped:
        job.evaluate()
    canceller.join()
    assert stopped.value.code == "evaluation_stopped"
    assert job.following.launcher.get(f"{job.id}-a1").phase is WorkloadPhase.EXITED
    assert job.outcomes() == ["cancelled"]
    assert job.ledger() == [(1, "usage")], "what ran is the tenant's"


def test_a_job_that_is_cancelled_before_its_evaluation_starts_gives_the_gpu_back(job: Evaluated) -> None:
    assert job.following.reserve(job.tenant, job.id) is not None
    cancel(job.platform, job.tenant, job.id)
    with pytest.raises(FtError) as stopped:
        step.evaluate(job.platform, job.following.launcher, job.tenant, job.id)
    assert stopped.value.code == "evaluation_stopped"
    assert (job.outcomes(), job.pids(), job.ledger()) == (["cancelled"], [], [])
    assert job.following.reserve(job.tenant, job.id) is None


def test_the_time_of_an_evaluation_is_held_until_it_is_over(job: Evaluated) -> None:
    def released() -> object:
        with job.platform.engine.connect() as conn:
            return conn.execute(sa.select(quota_holds.c.released_at).where(quota_holds.c.job_id == job.id)).scalar_one()

    evaluated = job.column("evaluation_s")
    assert isinstance(evaluated, float)
    with job.platform.engine.connect() as conn:
        held = conn.execute(sa.select(quota_holds.c.gpu_seconds).where(quota_holds.c.job_id == job.id)).scalar_one()
    assert held == pytest.approx(evaluated)
    assert released() is None
    cancel(job.platform, job.tenant, job.id)
    assert released() is not None


def test_the_agent_of_an_evaluation_writes_its_result_and_nothing_else(job: Evaluated) -> None:
    held = job.following.reserve(job.tenant, job.id)
    assert held is not None
    token = agents.introduce(job.platform, held, may_read=[])
    assert agents.held_by(job.platform, token) == held
    prefix = layout.attempt_prefix(job.tenant, job.id, 1)
    assert agents.write_urls(job.platform, held, WriteRequest(key=f"{prefix}/outputs/r.json", part_sha256=("0" * 64,))).parts
    for key in (f"{prefix}/train.log", f"{layout.job_prefix(job.tenant, job.id)}/final/a1/manifest.json"):
        with pytest.raises(Forbidden):
            agents.write_urls(job.platform, held, WriteRequest(key=key, part_sha256=("0" * 64,)))
    with pytest.raises(Forbidden, match="trains nothing"):
        agents.commit(job.platform, held, Commit(step=1, manifest_sha256="0", final=True))
    with job.platform.engine.connect() as conn:
        assert conn.execute(sa.select(agents_table.c.exit)).scalar_one() is None
    with pytest.raises(NotAdmitted):
        workloads.result(job.platform, job.tenant, job.id, None)


@pytest.mark.parametrize(
    "beat",
    [
        Heartbeat(exit=Exit(exit_code=0, evidence={}, stop_reason=None)),
        Heartbeat(exit=Exit(exit_code=0, evidence={"sha256": 5}, stop_reason=None)),
        Heartbeat(notices=(Notice(code=MILESTONE, level="info", message="", data={"kind": "planned"}),)),
        Heartbeat(notices=(Notice(code=MILESTONE, level="info", message="", data={"kind": "suite", "seconds": "long"}),)),
    ],
)
def test_impossible_report_of_evaluation_is_refused(job: Evaluated, beat: Heartbeat) -> None:
    held = job.following.reserve(job.tenant, job.id)
    assert held is not None
    token = agents.introduce(job.platform, held, may_read=[])
    with pytest.raises(InvalidRequest) as refused:
        agents.heartbeat(job.platform, token, beat)
    assert refused.value.code == "report_invalid"
    agents.heartbeat(job.platform, token, Heartbeat(exit=Exit(exit_code=0, evidence={"sha256": "0" * 64}, stop_reason=None)))


@pytest.mark.slow
def test_an_operators_suites_and_their_data_reach_the_process_by_digest(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    write_suite(tmp_path / "tasks", num_rows=6)
    (tmp_path / "data" / "arc_challenge").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "data" / "arc_challenge" / f"{split}.jsonl").write_text('{"question": "a"}\n' * (3 if split == "test" else 2))
    (tmp_path / "data" / "unasked.jsonl").write_text("{}\n")
    settings = replace(platform.settings, eval_task_dirs=(tmp_path / "tasks",), eval_data_dir=tmp_path / "data")
    platform = replace(platform, settings=settings)
    asked = {"capability": ["ours", "arc_challenge"]}
    job_id = evaluating_job(platform, tenant.id, write_chat_rows(), eval_config=asked)
    with following(platform, Scripted(platform.settings.work_dir / "launcher")) as made:
        job = Evaluated(following=made, tenant=tenant.id, id=job_id)
        job.tell(GO)
        made.reserve(tenant.id, job_id)
        job.evaluate()
    found = json.loads((job.job_dir / SUITES).read_text())
    assert {name: found[name] for name in asked["capability"]} == {"ours": 6, "arc_challenge": 3}
    stored = {info.key for info in platform.objects.list(workloads.TASKS_PREFIX)}
    assert len(stored) == 4, "two files of the suite, two of its data, and nothing that is not asked"
