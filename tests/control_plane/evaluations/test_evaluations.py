"""Evaluations of registered adapters as orders: made once, run three times at most, and what their verdicts accept."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from agent.messages import Exit
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.attempts import evaluation_endings
from control_plane.attempts import service as attempts
from control_plane.billing import ledger_check, refunds
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import Evaluation
from control_plane.evaluations.tables import evaluations as table
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from control_plane.queue.tables import held_devices
from control_plane.serving import accepted_bases
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import Conflict, FtError, IntegrityError, InvalidRequest, NotFound, QuotaExceeded
from engine.evals.config import EvalConfig
from engine.evals.gate.advice import Advice
from engine.evals.gate.verdict import Finding, Verdict
from engine.training.failures import StopReason
from ft_assets.adapters import reevaluation_step
from resources.launcher import LocalLauncher
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.claimed_job import asked_to_stop, ending, ledger
from tests.support.jobs.registered_adapter import add_adapter

LONGER = Advice(code="too_few_steps", message="Train for longer.")
OTHER = "b" * 64
FAILED = Finding(rule="task", code="task_not_better", passed=False, blocking=True, detail="0.1, needed 0.5")


def evaluated(*findings: Finding) -> Evaluated:
    outcome: Any = "quarantined" if findings else "passed"
    report: Any = None  # a verdict is kept without its report, which lies under the key
    return Evaluated(
        report=report,
        verdict=Verdict(outcome=outcome, findings=findings),
        advice=(LONGER,),
        key="k",
    )


@pytest.fixture
def digest(platform: Platform) -> str:
    return platform.models.get("tiny-base").digest


@pytest.fixture
def adapter(platform: Platform, tenant: Tenant, digest: str) -> str:
    return new_adapter(platform, tenant, base_digest=digest)


def new_adapter(platform: Platform, tenant: Tenant, **changes: Any) -> str:
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    return add_adapter(platform, tenant.id, name=name, **({"stage": "production", "loaded": False} | changes))


def judge(platform: Platform, evaluation_id: str, *findings: Finding, rules: EvalConfig | None = None) -> None:
    held = begin(platform, evaluation_id)
    with platform.engine.begin() as conn:
        assert evaluations.finish(conn, held, **evaluations.verdict_columns(evaluated(*findings), rules or EvalConfig(), platform.clock()))


def launcher_of(platform: Platform) -> LocalLauncher:
    return LocalLauncher(platform.settings.work_dir / "launcher")


def waiting(platform: Platform, evaluation_id: str) -> evaluations.DueEvaluation | None:
    return next((d for d in evaluations.due(platform) if d.id == evaluation_id), None)


def accepted(platform: Platform, tenant: str, adapter: str) -> frozenset[str]:
    record = adapters.get_adapter(platform, tenant, adapter)
    with platform.engine.connect() as conn:
        return accepted_bases.accepted_digests(platform.models, conn, record)


def order_on(platform: Platform, row: Evaluation, digest: str) -> str:
    """The same order on bytes that no catalogue here holds."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == row.id).values(base_digest=digest))
    return str(row.id)


def test_an_order_is_made_once_while_it_is_open(platform: Platform, tenant: Tenant, adapter: str, digest: str) -> None:
    first = evaluations.request(platform, tenant.id, adapter)
    assert (first.base_digest, first.kind, first.state) == (digest, "manual", "queued")
    assert evaluations.request(platform, tenant.id, adapter).id == first.id
    stricter = evaluations.request(platform, tenant.id, adapter, rules={"max_items": 5})
    assert stricter.id != first.id
    assert evaluations.request(platform, tenant.id, adapter, rules={"max_items": 5}).id == stricter.id
    assert evaluations.request(platform, tenant.id, adapter, kind=evaluations.BASE_UPDATE).id not in (first.id, stricter.id)
    judge(platform, first.id)
    assert evaluations.request(platform, tenant.id, adapter).id != first.id, "it has its verdict: this is another order"
    listed = evaluations.list_evaluations(platform, tenant.id, adapter)
    assert len(listed.items) == 4
    assert listed.items[-1].outcome == "passed"


def test_what_cannot_be_judged_is_not_ordered(platform: Platform, tenant: Tenant, adapter: str) -> None:
    with pytest.raises(IntegrityError):
        evaluations.request(platform, tenant.id, adapter, base_digest=OTHER)
    with pytest.raises(InvalidRequest, match="max_itemz"):
        evaluations.request(platform, tenant.id, adapter, rules={"max_itemz": 5})
    with pytest.raises(InvalidRequest, match="no-such-suite"):
        evaluations.request(platform, tenant.id, adapter, rules={"capability": ["no-such-suite"]})
    with pytest.raises(Conflict) as archived:
        evaluations.request(platform, tenant.id, new_adapter(platform, tenant, stage="archived"))
    assert archived.value.code == "not_reevaluated"
    with pytest.raises(NotFound):
        evaluations.request(platform, "somebody-else", adapter)


def test_a_tenant_has_ten_orders_open_at_most(platform: Platform, tenant: Tenant, adapter: str) -> None:
    for number in range(evaluations.MAX_OPEN):
        evaluations.request(platform, tenant.id, adapter, rules={"max_items": number + 1})
    with pytest.raises(QuotaExceeded) as refused:
        evaluations.request(platform, tenant.id, adapter, rules={"max_items": 99})
    assert refused.value.code == "too_many_evaluations"
    evaluations.request(platform, tenant.id, adapter, kind=evaluations.BASE_UPDATE)


def test_orders_of_one_tenant_are_counted_one_by_one(platform: Platform, tenant: Tenant, adapter: str, digest: str) -> None:
    other = new_adapter(platform, tenant, base_digest=digest)
    for number in range(evaluations.MAX_OPEN - 1):
        evaluations.request(platform, tenant.id, adapter, rules={"max_items": number + 1})
    with ThreadPoolExecutor(2) as both:
        with platform.engine.begin() as conn:
            conn.execute(sa.select(adapters_table.c.id).where(adapters_table.c.id == adapter).with_for_update())
            first = both.submit(evaluations.request, platform, tenant.id, adapter)
            time.sleep(0.2)
            second = both.submit(evaluations.request, platform, tenant.id, other)
            time.sleep(0.2)
            assert not (first.done() or second.done()), "the second waits until the first is counted"
        refused = [call for call in (first, second) if call.exception(20) is not None]
    (late,) = refused
    assert isinstance(late.exception(), QuotaExceeded)


def test_an_evaluation_is_found_by_its_own_adapter_alone(platform: Platform, tenant: Tenant, adapter: str, digest: str) -> None:
    order = evaluations.request(platform, tenant.id, adapter).id
    own, other = (adapters.get_adapter(platform, tenant.id, a) for a in (adapter, new_adapter(platform, tenant, base_digest=digest)))
    assert evaluations.find(platform, order, of=own).id == order
    with pytest.raises(NotFound):
        evaluations.find(platform, order, of=other)


def test_a_base_is_accepted_by_the_last_verdict_on_it(platform: Platform, tenant: Tenant, adapter: str, digest: str) -> None:
    assert accepted(platform, tenant.id, adapter) == {digest}
    for findings, then in (((), {digest, OTHER}), ((FAILED,), {digest}), ((), {digest, OTHER})):
        ordered = evaluations.request(platform, tenant.id, adapter, kind=evaluations.BASE_UPDATE)
        judge(platform, order_on(platform, ordered, OTHER), *findings)
        assert accepted(platform, tenant.id, adapter) == then


@pytest.mark.parametrize("alike", [True, False])
def test_adapter_of_earlier_files_is_accepted_on_present_ones_that_answer_alike(
    platform: Platform, tenant: Tenant, digest: str, alike: bool
) -> None:
    entry, root = platform.models.entry("tiny-base")
    models = Catalogue({"tiny-base": ({**entry, "previous": [{"digest": OTHER, "answers_alike": alike}]}, root)})
    later, before = replace(platform, models=models), new_adapter(platform, tenant, base_digest=OTHER)
    assert accepted(later, tenant.id, before) == ({OTHER, digest} if alike else {OTHER})
    with platform.engine.connect() as conn:
        served = accepted_bases.accepted_on_other_bases(models, conn, {("tiny-base", digest), ("other", "c" * 64)})
    assert ((before, digest) in served) is alike


def test_a_verdict_under_rules_of_its_own_accepts_nothing(platform: Platform, tenant: Tenant, adapter: str, digest: str) -> None:
    ordered = evaluations.request(platform, tenant.id, adapter, rules={"skip": ["task"]})
    judge(platform, order_on(platform, ordered, OTHER))
    assert accepted(platform, tenant.id, adapter) == {digest}


@pytest.fixture
def order(fresh_platform: Platform) -> Evaluation:
    """An order that alone waits for a GPU."""
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    made = new_adapter(fresh_platform, owner, base_digest=fresh_platform.models.get("tiny-base").digest)
    return evaluations.request(fresh_platform, owner.id, made)


def test_an_order_that_fails_is_tried_again_and_after_three_attempts_it_is_over(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    assert waiting(platform, order.id) is None, "it needs no run before it holds a reservation"
    for run in range(evaluations.MAX_RUNS):
        cycle.run_cycle(platform)
        due = waiting(platform, order.id)
        assert due is not None
        assert due.run_key == f"{order.id}#{run}"
        assert cycle.run_cycle(platform) == [], "one at a time"
        held = attempts.claim(platform, order.tenant_id, order.job_id)
        assert (held.evaluation_id, held.attempt) == (order.id, run + 1)
        unstarted = WorkloadStatus(name=held.workload, phase=WorkloadPhase.ABSENT)
        attempts.finish(platform, held, evaluation_endings.refused(unstarted, FtError("no memory", code="evaluation_failed")))
    cycle.run_cycle(platform)
    assert waiting(platform, order.id) is None
    row = evaluations.find(platform, order.id)
    assert row.error is not None
    assert (row.state, row.error["message"], row.runs) == ("failed", "attempt 3 of the evaluation: no memory", 3)
    another = evaluations.request(platform, order.tenant_id, order.adapter_id)
    assert another.id != order.id
    cycle.run_cycle(platform)
    held = attempts.claim(platform, order.tenant_id, order.job_id)
    attempts.finish(platform, held, evaluation_endings.refused(unstarted, FtError("no memory", code="evaluation_failed")))
    assert (held.evaluation_id, evaluations.find(platform, another.id).state) == (another.id, "queued"), "it has three attempts of its own"


def test_an_order_whose_agent_gives_up_is_tried_three_times(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    gave_up = Exit(exit_code=None, evidence=None, stop_reason=StopReason.STALLED, stall="the object store does not answer")
    for _ in range(evaluation_endings.MAX_FAILURES):
        cycle.run_cycle(platform)
        held = attempts.claim(platform, order.tenant_id, order.job_id)
        status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=1)
        ending = evaluation_endings.judge(gave_up, status, cancelled=False, stalled=False)
        attempts.finish(platform, held, ending)
    assert ending.outcome == "evaluation_stalled"
    row = evaluations.find(platform, order.id)
    assert row.error is not None
    assert (row.state, row.error["code"]) == ("failed", "evaluation_stalled")
    assert row.error["message"] == "attempt 3 of the evaluation: the object store does not answer"


def test_a_replaced_run_writes_nothing_any_more(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    cycle.run_cycle(platform)
    due, held = waiting(platform, order.id), evaluations.find(platform, order.id)
    assert due is not None
    evaluations.replace_run(platform, launcher_of(platform), due, "ended FAILURE")
    again = waiting(platform, order.id)
    assert again is not None
    assert again.run_key == f"{order.id}#1"
    with platform.engine.begin() as conn:
        assert not evaluations.finish(conn, held, state="succeeded", outcome="passed")
        assert evaluations.finish(conn, evaluations.find(platform, order.id), state="succeeded", outcome="quarantined")


def test_an_order_whose_runs_never_begin_is_given_up_and_gives_its_gpu_back(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    cycle.run_cycle(platform)
    for run in range(evaluations.MAX_RUNS):
        due = waiting(platform, order.id)
        assert due is not None
        assert evaluations.find(platform, order.id).runs == run + 1
        evaluations.replace_run(platform, launcher_of(platform), due, "ended FAILURE")
        evaluations.replace_run(platform, launcher_of(platform), due, "told twice")
    assert evaluations.find(platform, order.id).state == "failed"
    assert waiting(platform, order.id) is None
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(held_devices)).all() == []


def give_up(platform: Platform, order: Evaluation) -> None:
    """Three of its runs die."""
    for _ in range(evaluations.MAX_RUNS):
        due = waiting(platform, order.id)
        assert due is not None
        evaluations.replace_run(platform, launcher_of(platform), due, "ended FAILURE")
    row = evaluations.find(platform, order.id)
    assert row.error is not None
    assert (row.state, row.error["code"]) == ("failed", "evaluation_lost")


def test_an_order_that_is_given_up_while_it_runs_is_refunded(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    cycle.run_cycle(platform)
    held = attempts.claim(platform, order.tenant_id, order.job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    give_up(platform, order)
    told_to = Exit(exit_code=None, evidence=None, stop_reason=asked_to_stop(platform, held))
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0, started_at=1000.0, ended_at=1036.0)
    ended = evaluation_endings.judge(told_to, status, cancelled=False, stalled=False)
    assert ended.outcome == "cancelled"
    attempts.finish(platform, held, ended)
    refund, usage = ledger(platform, order.job_id)
    assert (refund.kind, usage.kind) == ("refund", "usage")
    assert refund.amount_micros == -usage.amount_micros < 0


def test_an_operator_decides_on_the_bill_of_a_result_that_got_no_report(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    cycle.run_cycle(platform)
    held = attempts.claim(platform, order.tenant_id, order.job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    attempts.finish(platform, held, ending())
    assert [e.kind for e in ledger(platform, order.job_id)] == ["usage"]
    give_up(platform, order)
    (case,) = refunds.list_cases(platform, tenant=order.tenant_id).items
    assert (case.job_id, case.attempt, case.outcome) == (order.job_id, held.attempt, "evaluation_lost")
    refunds.grant(platform, case.id, by="op", note="no report was made")
    assert sum(e.amount_micros for e in ledger(platform, order.job_id)) == 0
    assert ledger_check.check(platform).differences == ()


def test_runs_are_counted_anew_for_each_attempt(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    for _ in range(evaluations.MAX_RUNS):
        cycle.run_cycle(platform)
        held = attempts.claim(platform, order.tenant_id, order.job_id)
        taken_back = Exit(exit_code=None, evidence=None, stop_reason=StopReason.PREEMPT)
        status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0)
        attempts.finish(platform, held, evaluation_endings.judge(taken_back, status, cancelled=False, stalled=False))
    cycle.run_cycle(platform)
    for _ in range(evaluations.MAX_RUNS - 1):
        due = waiting(platform, order.id)
        assert due is not None
        evaluations.replace_run(platform, launcher_of(platform), due, "ended FAILURE")
    assert evaluations.find(platform, order.id).state == "running"
    due = waiting(platform, order.id)
    assert due is not None
    evaluations.replace_run(platform, launcher_of(platform), due, "ended FAILURE")
    assert evaluations.find(platform, order.id).state == "failed"


def test_a_monitored_failure_is_among_the_reasons_and_a_skipped_one_is_not() -> None:
    found = [replace(FAILED, rule=rule, code=rule, blocking=False) for rule in ("task", "golden", "regression")]
    monitored = replace(evaluated(), verdict=Verdict(outcome="passed", findings=tuple(found), mode="monitor"))
    rules = EvalConfig(mode="monitor", skip=("golden",))
    assert [f.code for f in monitored.failed(rules)] == ["task"]
    assert [f.code for f in monitored.failed(replace(rules, block_regression=True))] == ["task", "regression"]


def test_an_adapter_whose_files_are_missing_is_not_judged_and_its_order_says_so(fresh_platform: Platform, order: Evaluation) -> None:
    platform = fresh_platform
    cycle.run_cycle(platform)
    with pytest.raises(FtError):
        reevaluation_step.run(platform, launcher_of(platform), order.id)
    row = evaluations.find(platform, order.id)
    assert row.error is not None
    assert (row.state, row.runs, row.error["code"]) == ("queued", 1, "object_not_found")
    with platform.engine.connect() as conn:
        events = conn.execute(sa.select(job_events).where(job_events.c.job_id == row.job_id)).all()
    assert events == []


@pytest.mark.parametrize(("stage", "said"), [("production", "is to be updated"), ("draft", "was updated to while it was trained")])
def test_what_a_tenant_is_told_depends_on_whether_the_base_was_switched_already(
    platform: Platform, tenant: Tenant, digest: str, stage: str, said: str
) -> None:
    record = adapters.get_adapter(platform, tenant.id, new_adapter(platform, tenant, base_digest=digest, stage=stage))
    held = evaluations.request(platform, tenant.id, record.id, kind=evaluations.BASE_UPDATE)
    job: Any = None
    subject = reevaluation_step.Subject(record=record, job=job, base_dir=platform.settings.work_dir, rules=EvalConfig())
    told = reevaluation_step._alert(held, subject, evaluated(FAILED), waited=reevaluation_step._waits(record))
    assert told is not None
    assert said in told.message


@pytest.mark.parametrize(
    ("on", "rules", "said"),
    [
        ("e" * 64, None, "not served on those until it passes there"),
        ("e" * 64, {"max_items": 8}, "serving is unchanged"),
        (None, None, "serving is unchanged"),
    ],
)
def test_a_failed_request_says_whether_it_keeps_the_adapter_from_a_base(
    platform: Platform, tenant: Tenant, digest: str, on: str | None, rules: dict[str, Any] | None, said: str
) -> None:
    record = adapters.get_adapter(platform, tenant.id, new_adapter(platform, tenant, base_digest=on or digest))
    held = evaluations.request(platform, tenant.id, record.id, rules=rules)
    job: Any = None
    subject = reevaluation_step.Subject(record=record, job=job, base_dir=platform.settings.work_dir, rules=EvalConfig())
    told = reevaluation_step._alert(held, subject, evaluated(FAILED), waited=False)
    assert told is not None and said in told.message
