"""How evaluated jobs end: promoted, monitored, waiting for a person or for a verdict on the present base, or in quarantine."""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.attempts.tables import checkpoints
from control_plane.evaluations import answer_cache, reports
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.evaluation_workload import StoredWeights
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import Evaluation, eval_scores
from control_plane.jobs import service as jobs
from control_plane.jobs import transitions
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.models import base_updates
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Platform, utc_now
from control_plane.tenants.rules import Tenant
from core.errors import Conflict
from engine.evals.gate.verdict import Finding, Verdict
from engine.evals.scoring.samples import Sample
from engine.evals.scoring.scores import Score
from ft_assets.adapters import reevaluation_step
from ft_assets.adapters import step as adapter_step
from ft_assets.evals import step as evaluation_step
from resources.launcher import LocalLauncher
from tests.control_plane.attempts.test_health import MemoryTracker
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.evaluated_jobs import FAILED, MODEL, REPORT, Evaluate
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.fleet_in_memory import OwnServers, Server, Servers
from tests.support.platform.lock_waits import wait_for_a_lock


def withdraw_all(platform: Platform) -> None:
    """What other tests left in production on the same base would hold an update back."""
    with platform.engine.begin() as conn:
        conn.execute(sa.text("UPDATE adapters SET stage = 'staging' WHERE stage = 'production'"))


def job(platform: Platform, job_id: str) -> sa.RowMapping:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).mappings().one()


def last_event(platform: Platform, job_id: str, code: str | None = None) -> sa.RowMapping | None:
    query = sa.select(job_events).where(job_events.c.job_id == job_id).order_by(job_events.c.seq.desc()).limit(1)
    with platform.engine.connect() as conn:
        return conn.execute(query if code is None else query.where(job_events.c.code == code)).mappings().one_or_none()


def verdicts(platform: Platform, tenant: Tenant, adapter_id: str) -> list[tuple[str, str | None, list[str] | None]]:
    found = evaluations.list_evaluations(platform, tenant.id, adapter_id).items
    return [(row.kind, row.outcome, None if row.reasons is None else list(row.reasons)) for row in found]


def test_a_passed_adapter_is_promoted_and_its_verdict_is_kept_once(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job()
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert made.stage == "production"
    assert job(operated, job_id)["state"] == "succeeded"
    assert adapter_step.conclude(operated, tenant.id, job_id).id == made.id
    assert verdicts(operated, tenant, made.id) == [("gate", "passed", [])]


@pytest.mark.slow
def test_a_job_that_another_run_concluded_meanwhile_ends_once_and_is_served(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    job_id, first = evaluated_job(), list[Adapter]()

    def clock() -> datetime:  # of a run that has read the job; its first look after the registration is outside of transactions
        with operated.engine.connect() as conn:
            is_registered = conn.scalar(sa.select(sa.exists().where(adapters_table.c.job_id == job_id)))
        if is_registered and not first:
            first.append(adapter_step.conclude(operated, tenant.id, job_id))
        return operated.clock()

    second = adapter_step.conclude(replace(operated, clock=clock), tenant.id, job_id)
    assert [(one.id, one.stage) for one in (*first, second)] == [(second.id, "production")] * 2
    assert published(operated, job_id)[-1:] == ["fine_tuning.job.succeeded"]
    assert verdicts(operated, tenant, second.id) == [("gate", "passed", [])]


def published(platform: Platform, subject: str) -> list[str]:
    with platform.engine.connect() as conn:
        return list(conn.execute(sa.select(outbox.c.type).where(outbox.c.subject == subject).order_by(outbox.c.seq)).scalars())


def test_a_failed_adapter_is_quarantined_with_reasons_and_advice(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(FAILED)
    with operated.engine.begin() as conn:
        final = conn.execute(sa.select(checkpoints.c.manifest_sha256).where(checkpoints.c.job_id == job_id, checkpoints.c.final)).scalar()
        answers = {"suite_digest": "s", "suite": "golden", "scores": {}, "tenant_id": tenant.id, "created_at": operated.clock()}
        conn.execute(sa.insert(eval_scores).values(subject_digest=f"base+{final}@cpu", **answers))
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert made.stage == "quarantined"
    with operated.engine.connect() as conn:
        assert conn.execute(sa.select(eval_scores).where(eval_scores.c.tenant_id == tenant.id)).all() == [], "it is compared with none"
    ended = job(operated, job_id)
    assert (ended["state"], ended["error"]["code"]) == ("failed", "gate_failed")
    assert "task_not_better: 0.1, needed 0.5" in ended["error"]["message"]
    assert "Train for longer." in ended["error"]["message"]
    assert verdicts(operated, tenant, made.id) == [("gate", "quarantined", ["task_not_better"])]
    assert published(operated, made.id) == ["adapter.quarantined"]
    adapter_step.conclude(operated, tenant.id, job_id)
    assert published(operated, made.id) == ["adapter.quarantined"], "once"


def test_a_monitored_failure_is_told_and_does_not_block(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(replace(FAILED, blocking=False), eval_config={"mode": "monitor"})
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, job(operated, job_id)["state"]) == ("production", "succeeded")
    told = last_event(operated, job_id, "monitor_failed")
    assert told is not None
    assert (told["level"], told["data"]["reasons"]) == ("warn", ["task_not_better"])
    assert "needed 0.5. Train for longer." in told["message"]
    assert verdicts(operated, tenant, made.id) == [("monitor", None, None), ("gate", "passed", ["task_not_better"])]


def test_a_job_with_its_gate_off_is_served_and_not_evaluated_again(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(replace(FAILED, blocking=False), eval_config={"mode": "off"})
    made = adapter_step.conclude(operated, tenant.id, job_id)
    ended = job(operated, job_id)
    assert (made.stage, ended["state"]) == ("production", "succeeded")
    assert verdicts(operated, tenant, made.id) == [("gate", "passed", ["task_not_better"])]
    assert last_event(operated, job_id, "monitor_failed") is None
    told = last_event(operated, job_id)
    assert told is not None and "was not gated and is in production" in told["message"]


def test_a_monitored_jobs_promotion_waits_for_the_short_suites_alone_and_the_others_follow(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    asked = {"mode": "monitor", "capability": ["arc-standin"], "judge": True, "skip": ["golden"]}
    job_id = evaluated_job(eval_config={**asked, "capability": []})
    with operated.engine.begin() as conn:
        request = {**job(operated, job_id)["request"], "eval_config": asked}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(request=request))
        row = transitions.job_row(conn, tenant.id, job_id)
        final = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.final)).one()
    trained = StoredWeights(prefix=final.object_prefix, manifest_sha256=final.manifest_sha256)
    own = evaluation_step._own_rules(operated, row, trained)
    assert (own.capability, own.judge, own.skip) == ((), False, ("golden", "suites", "capability", "safety", "judge"))
    manifest = json.dumps({"files": {"config.json": {"sha256": "0"}, "model.safetensors": {"sha256": "0"}}}).encode()
    operated.objects.put_bytes("whole/manifest.json", manifest)
    whole = StoredWeights(prefix="whole", manifest_sha256=hashlib.sha256(manifest).hexdigest())
    assert evaluation_step._own_rules(operated, row, whole).capability == ("arc-standin",), "it is evaluated this once"
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, job(operated, job_id)["state"]) == ("production", "succeeded")
    full = evaluations.list_evaluations(operated, tenant.id, made.id).items[0]
    assert (full.kind, full.state) == ("monitor", "queued")
    assert evaluations.rules_of(row.request, full.eval_config).capability == ("arc-standin",)


def test_an_adapter_is_compared_with_the_one_promoted_before_it_and_never_with_a_newer_one(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    suffixes = ("Support.Bot", "support-bot")  # one name in requests
    made = [adapter_step.conclude(operated, tenant.id, evaluated_job(seed=seed, suffix=suffix)) for seed, suffix in enumerate(suffixes)]
    with operated.engine.connect() as conn:
        rows = [transitions.job_row(conn, tenant.id, a.job_id) for a in made]
    found = [answer_cache.previous(operated, tenant.id, row, "d" * 64) for row in rows]
    assert found[0] is None
    assert found[1] is not None
    assert found[1].adapter_id == made[0].id


def test_a_monitored_adapter_that_is_not_applied_is_blocked_all_the_same(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    unapplied = Finding(rule="adapter_applied", code="adapter_not_applied", passed=False, blocking=True, detail="0")
    job_id = evaluated_job(unapplied, eval_config={"mode": "monitor"})
    assert adapter_step.conclude(operated, tenant.id, job_id).stage == "quarantined"
    assert job(operated, job_id)["error"]["code"] == "gate_failed"


def test_an_adapter_that_needs_approval_waits_for_it(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(eval_config={"approval": "required"})
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, made.approval) == ("staging", "pending")
    ended = job(operated, job_id)
    assert (ended["state"], ended["fine_tuned_model"]) == ("succeeded", made.name)
    told = last_event(operated, job_id)
    assert told is not None
    assert f"ft adapters approve {made.id}" in told["message"]
    with pytest.raises(Conflict, match="needs_approval"):
        promotions.promote(operated, tenant.id, made.id)
    assert promotions.approve(operated, tenant.id, made.id, by="key-1", and_promote=True).stage == "production"
    assert published(operated, made.id) == ["adapter.approval_pending", "adapter.promoted"]


@pytest.mark.parametrize("served", [True, False])
def test_a_whole_model_waits_for_a_person_who_promotes_it(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, served: bool
) -> None:
    platform = replace(operated, servers=OwnServers(Servers()) if served else None)
    job_id = evaluated_job(whole=True)
    made = adapter_step.conclude(platform, tenant.id, job_id)
    assert (made.type, made.stage, job(platform, job_id)["state"]) == ("full_model", "draft", "succeeded")
    told = last_event(platform, job_id)
    assert told is not None and told["message"].startswith(f"Model {made.name} passed its gate and is in draft; it is not served yet: ")
    then = f"promote it with `ft promote {made.id}`." if served else "this platform starts no servers"
    assert then in told["message"]


def test_a_whole_model_that_needs_approval_waits_for_it(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    platform = replace(operated, servers=OwnServers(Servers()))
    job_id = evaluated_job(whole=True, eval_config={"approval": "required"})
    made = adapter_step.conclude(platform, tenant.id, job_id)
    assert (made.type, made.stage, made.approval) == ("full_model", "staging", "pending")
    told = last_event(platform, job_id)
    assert told is not None and f"ft adapters approve {made.id}" in told["message"]
    assert promotions.approve(platform, tenant.id, made.id, by="key-1", and_promote=True).stage == "production"


def test_approval_is_needed_from_registration_on_however_the_job_ends(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(eval_config={"approval": "required"})
    jobs.cancel(operated, tenant.id, job_id)
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, made.approval) == ("draft", "pending")
    with pytest.raises(Conflict, match="needs_approval"):
        promotions.promote(operated, tenant.id, made.id)


def updated_meanwhile(platform: Platform, tenant: Tenant, job_id: str, new: Path) -> tuple[Adapter, Evaluation]:
    """Conclude a job whose base was updated while it was trained: its adapter, and the evaluation that it waits for."""
    withdraw_all(platform)
    base_updates.stage_local(platform, MODEL, build_tiny_model(new, seed=1))
    done = base_updates.apply(platform, MODEL)
    made = adapter_step.conclude(platform, tenant.id, job_id)
    assert job(platform, job_id)["state"] == "succeeded"
    newest, own = evaluations.list_evaluations(platform, tenant.id, made.id).items
    assert (newest.kind, newest.base_digest, newest.state) == ("base_update", done.digest, "queued")
    assert own.base_digest == made.base_digest != done.digest
    with pytest.raises(Conflict, match="base_digest_mismatch"):
        promotions.promote(platform, tenant.id, made.id)
    return made, newest


def test_base_that_was_updated_meanwhile_costs_an_experiment_no_evaluation(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path
) -> None:
    job_id = evaluated_job(eval_config={"mode": "experiment"})
    withdraw_all(operated)
    base_updates.stage_local(operated, MODEL, build_tiny_model(tmp_path / "new", seed=1))
    base_updates.apply(operated, MODEL)
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, verdicts(operated, tenant, made.id)) == ("draft", [("gate", "passed", [])])
    with pytest.raises(Conflict, match="base_digest_mismatch"):
        promotions.promote(operated, tenant.id, made.id)


@pytest.mark.parametrize(("asked", "stage"), [({}, "draft"), ({"auto_promote": True}, "production")])
def test_an_experiment_is_promoted_only_on_request(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, asked: dict[str, Any], stage: str
) -> None:
    job_id = evaluated_job(eval_config={"mode": "experiment"}, **asked)
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, job(operated, job_id)["state"]) == (stage, "succeeded")


def passed_and_died(platform: Platform, evaluation_id: str) -> None:
    """A run that passed and died before it went on."""
    held = begin(platform, evaluation_id)
    passed = Evaluated(report=REPORT, verdict=Verdict(outcome="passed", findings=()), advice=(), key="k")
    with platform.engine.begin() as conn:
        assert evaluations.finish(conn, held, **evaluations.verdict_columns(passed, evaluations.rules_of(None, None), platform.clock()))


def judged(platform: Platform, evaluation_id: str) -> None:
    """A run that passed and died before it went on, and the one that finds its verdict."""
    passed_and_died(platform, evaluation_id)
    reevaluation_step.run(platform, LocalLauncher(platform.settings.work_dir / "launcher"), evaluation_id)


def test_a_pass_whose_run_died_is_taken_up_by_itself_and_once(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path
) -> None:
    job_id = evaluated_job()
    made, ordered = updated_meanwhile(operated, tenant, job_id, tmp_path / "new")
    passed_and_died(operated, ordered.id)
    assert ordered.id not in reevaluation_step.take_up(operated), "its run may still be at it"
    later = replace(operated, clock=lambda: utc_now() + 2 * reevaluation_step.SETTLED)
    assert ordered.id in reevaluation_step.take_up(later)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == "production"
    assert reevaluation_step.take_up(later) == []


def test_an_adapter_whose_base_was_updated_meanwhile_is_promoted_after_a_pass_on_the_present_one(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path
) -> None:
    job_id = evaluated_job()
    made, ordered = updated_meanwhile(operated, tenant, job_id, tmp_path / "new")
    assert made.stage == "draft"
    judged(operated, ordered.id)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == "production"
    told = last_event(operated, job_id, "reevaluation_passed")
    assert told is not None
    assert "is promoted" in told["message"]


@pytest.mark.parametrize(
    ("body", "stage", "command"),
    [({"auto_promote": False}, "draft", "ft promote"), ({"eval_config": {"approval": "required"}}, "staging", "ft adapters approve")],
)
def test_a_pass_on_the_present_base_promotes_nothing_that_waits_for_more(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path, body: dict[str, Any], stage: str, command: str
) -> None:
    job_id = evaluated_job(**body)
    made, ordered = updated_meanwhile(operated, tenant, job_id, tmp_path / "new")
    judged(operated, ordered.id)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == stage
    told = last_event(operated, job_id, "reevaluation_passed")
    assert told is not None
    assert f"{command} {made.id}" in told["message"]
    assert reevaluation_step.take_up(replace(operated, clock=lambda: utc_now() + 2 * reevaluation_step.SETTLED)) == [], "told once"


def test_a_base_that_is_updated_once_more_is_judged_on_too(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path
) -> None:
    made, ordered = updated_meanwhile(operated, tenant, evaluated_job(), tmp_path / "new")
    base_updates.stage_local(operated, MODEL, build_tiny_model(tmp_path / "newer", seed=2))
    done = base_updates.apply(operated, MODEL)
    judged(operated, ordered.id)
    newest = evaluations.list_evaluations(operated, tenant.id, made.id).items[0]
    assert (newest.kind, newest.base_digest, newest.state) == ("base_update", done.digest, "queued")
    with operated.engine.begin() as conn:
        assert evaluations.finish(conn, begin(operated, newest.id), state="failed", finished_at=operated.clock())
    reevaluation_step.take_up(replace(operated, clock=lambda: utc_now() + 2 * reevaluation_step.SETTLED))
    assert evaluations.list_evaluations(operated, tenant.id, made.id).items[0].id == newest.id, "it is not ordered again"


def test_an_update_between_the_checks_and_the_promotion_is_seen(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, tmp_path: Path
) -> None:
    withdraw_all(operated)
    made = adapter_step.conclude(operated, tenant.id, evaluated_job(auto_promote=False))
    base_updates.stage_local(operated, MODEL, build_tiny_model(tmp_path / "new", seed=1))
    switching, go_on = threading.Event(), threading.Event()

    def clock() -> datetime:  # asked for once the update has locked the adapters and before it writes
        switching.set()
        assert go_on.wait(20)
        return operated.clock()

    with ThreadPoolExecutor(2) as both:
        update = both.submit(base_updates.apply, replace(operated, clock=clock), MODEL)
        assert switching.wait(20)
        promotion = both.submit(promotions.promote, operated, tenant.id, made.id)
        try:
            wait_for_a_lock(operated)
        finally:
            go_on.set()
        assert update.result(20).staged is None
        with pytest.raises(Conflict, match="base_digest_mismatch"):
            promotion.result(20)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == "draft"


def test_an_adapter_that_may_not_be_served_now_is_kept_and_the_job_says_why(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    servers = Servers("http://one")
    servers.at["http://one"] = Server(base=MODEL, digest="e" * 64)
    job_id = evaluated_job()
    kept = adapter_step.conclude(replace(operated, fleet=servers), tenant.id, job_id)
    assert (kept.stage, job(operated, job_id)["state"]) == ("draft", "succeeded")
    told = last_event(operated, job_id)
    assert told is not None
    assert "base_digest_mismatch" in told["message"]


def test_the_evaluation_is_shown_in_the_run_of_the_attempt_that_trained_without_the_tenants_rows(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    job_id = evaluated_job(FAILED)
    stored = reports.load_evaluated(operated, tenant.id, job_id)
    sample = Sample(id="row-1", change="gained", prompt="a tenant's row", expected="e", base="b", adapter="a")
    score = Score(suite="golden", metric="exact_match", n=9, base=0.5, adapter=0.75, previous=None, ci_low=0.1, ci_high=0.4)
    with_rows = replace(stored, report=replace(stored.report, samples=(sample,), scores=(score,)))
    operated.objects.put_bytes(stored.key, json.dumps(with_rows.to_dict()).encode())
    tracker = MemoryTracker()
    evaluation_step.track(replace(operated, tracker=tracker), tenant.id, job_id)
    assert set(tracker.files) == {"evaluation/report.json", "evaluation/report.md"}
    assert "task_not_better" in tracker.files["evaluation/report.md"].decode()
    assert json.loads(tracker.files["evaluation/report.json"])["verdict"]["outcome"] == "quarantined"
    assert b"a tenant's row" not in b"".join(tracker.files.values()) and "a tenant's row" not in str(tracker.tables)
    scores, gate = tracker.tables["evaluation/scores.json"], tracker.tables["evaluation/gate.json"]
    assert [(row["suite"], row["adapter"], row["gain"]) for row in scores] == [("golden", 0.75, 0.25)]
    assert [row["code"] for row in gate if not row["passed"]] == ["task_not_better"]
    evaluation_step.track(operated, tenant.id, job_id)  # nothing is tracked: nothing happens
