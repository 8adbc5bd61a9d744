"""Models that did not pass their gate and are released by a person."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.api.app import create_app
from control_plane.evaluations import next_run, releases
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import audit_log
from core.errors import Conflict, Forbidden, FtError, NotFound
from engine.evals.gate.verdict import Finding
from ft_assets.adapters import step as adapter_step
from tests.support.jobs.evaluated_jobs import FAILED, LONGER, Evaluate

UNSAFE = Finding(rule="safety", code="refusals_too_few", passed=False, blocking=True, detail="refuses 3 of 62")
UNJUDGED = Finding(
    rule="safety", code="safety_not_judged", passed=False, blocking=True, detail="safety not judged: the base refuses 3 of 62"
)
UNAPPLIED = Finding(rule="adapter_applied", code="adapter_not_applied", passed=False, blocking=True, detail="difference 0")
REASON = "reviewed 50 answers by hand"


def quarantined(platform: Platform, tenant: Tenant, job_id: str) -> Adapter:
    made = adapter_step.conclude(platform, tenant.id, job_id)
    assert made.stage == "quarantined"
    return made


def refusal(platform: Platform, tenant: Tenant, made: Adapter, *, reason: str = REASON, by_operator: bool = False) -> FtError:
    with pytest.raises(FtError) as refused:
        releases.release(platform, tenant.id, made.id, by="key_a", reason=reason, by_operator=by_operator)
    assert adapters.get_adapter(platform, tenant.id, made.id).released_at is None
    return refused.value


def test_a_released_model_is_served_and_its_job_succeeds(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(FAILED)
    made = quarantined(operated, tenant, job_id)
    ended = jobs.get(operated, tenant.id, job_id).job
    scoped = operated.in_scope_of(tenant.id, Actor(kind="key", id="key_a"))
    released = releases.release(scoped, tenant.id, made.name, by="key_a", reason=f"  {REASON} ")
    assert (released.stage, released.desired, released.eval_passed) == ("production", "loaded", False)
    assert (released.released_by, released.release_reason) == ("key_a", REASON)
    job = jobs.get(operated, tenant.id, job_id).job
    assert (job.state, job.error, job.fine_tuned_model, job.finished_at) == ("succeeded", None, made.name, ended.finished_at)
    assert promotions.resolve_model(operated, tenant.id, made.name).model == made.name
    with operated.engine.connect() as conn:
        events = conn.scalars(sa.select(job_events.c.message).where(job_events.c.job_id == job_id).order_by(job_events.c.seq)).all()
        told = conn.execute(
            sa.select(outbox.c.type, outbox.c.data).where(outbox.c.subject.in_([made.id, job_id])).order_by(outbox.c.seq)
        ).all()
        audited = conn.execute(sa.select(audit_log.c.actor_id, audit_log.c.changes).where(audit_log.c.object_id == made.id)).all()
    assert events[-1] == f"Model {made.name} did not pass its gate and was released by key_a: {REASON}"
    assert [kind for kind, _ in told][-3:] == ["adapter.released", "fine_tuning.job.succeeded", "adapter.promoted"]
    assert all("error_code" not in data for kind, data in told if kind == "fine_tuning.job.succeeded")
    assert ("key_a", REASON) in [(actor, changes.get("release_reason", [None])[-1]) for actor, changes in audited]
    assert releases.release(operated, tenant.id, made.id, by="key_b", reason="again").released_by == "key_a"


def test_a_model_that_is_not_approved_is_refused_with_the_next_step(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    with pytest.raises(Forbidden) as refused:
        promotions.resolve_model(operated, tenant.id, made.name)
    assert (refused.value.code, refused.value.http_status) == ("model_not_approved", 403)
    assert f"ft adapters release {made.id} --reason" in refused.value.message and "promote" not in refused.value.message
    with pytest.raises(Conflict) as unpromoted:
        promotions.promote(operated, tenant.id, made.id)
    assert "gate_failed" in unpromoted.value.message


@pytest.mark.parametrize(
    ("policy", "failed", "step"),
    [
        ("tenant", (FAILED, UNSAFE), "an operator can release it: `ft admin adapters release {tenant} {adapter} --reason ...`"),
        ("operator", (FAILED,), "an operator can release it: `ft admin adapters release {tenant} {adapter} --reason ...`"),
        ("tenant", (FAILED, UNAPPLIED), "it cannot be released; train again"),
    ],
    ids=["unsafe", "policy", "unapplied"],
)
def test_every_next_step_is_one_that_the_release_takes(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, policy: str, failed: tuple[Finding, ...], step: str
) -> None:
    platform = replace(operated, settings=replace(operated.settings, release_policy=policy))
    job_id = evaluated_job(*failed)
    made = quarantined(platform, tenant, job_id)
    error = jobs.get(platform, tenant.id, job_id).job.error
    with pytest.raises(Forbidden) as unserved:
        promotions.resolve_model(platform, tenant.id, made.name)
    with pytest.raises(Conflict) as unpromoted:
        promotions.promote(platform, tenant.id, made.id)
    wanted = step.format(tenant=tenant.id, adapter=made.id)
    for message in (error["message"] if error else "", unserved.value.message, unpromoted.value.message):
        assert wanted in message and "`ft adapters release" not in message
    assert refusal(platform, tenant, made).code == "release_refused"


Open = Callable[[Platform, str, str], str]


@pytest.fixture
def open_page(serve: Callable[..., str], tenant: Tenant) -> Open:
    """Returns the text of a console page, as a key of that scope sees it."""

    def opened(platform: Platform, scope: str, path: str) -> str:
        key = tenants.create_key(platform, tenant.id, name=scope, scopes=[scope]).secret
        with httpx.Client(base_url=serve(create_app(platform)), timeout=60) as http:
            http.post("/console/sign-in", data={"key": key})
            return html.unescape(re.sub(r"<(?!form|a )[^>]+>", "", http.get(path).text))

    return opened


BY_ADMIN = "An admin of this tenant can serve it anyway."


@pytest.mark.parametrize(
    ("policy", "scope", "failed", "sentence"),
    [
        ("tenant", "admin", (FAILED,), ""),
        ("tenant", "write", (FAILED,), BY_ADMIN),
        ("tenant", "admin", (FAILED, UNSAFE), "You cannot serve it anyway: refuses 3 of 62; only an operator may release it."),
        ("operator", "admin", (FAILED,), "You cannot serve it anyway: here only operators release models; ask one."),
        ("tenant", "admin", (FAILED, UNAPPLIED), "It cannot be served anyway: difference 0; train again."),
    ],
    ids=["admin", "member", "unsafe", "policy", "unapplied"],
)
@pytest.mark.parametrize("mode", ["gate", "experiment"])
def test_pages_offer_only_a_release_that_would_be_accepted(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, open_page: Open,
    mode: str, policy: str, scope: str, failed: tuple[Finding, ...], sentence: str,
) -> None:  # fmt: skip
    platform = replace(operated, settings=replace(operated.settings, release_policy=policy))
    made = quarantined(platform, tenant, evaluated_job(*failed, eval_config={"mode": mode}))
    model, job = (open_page(platform, scope, f"/console/{path}") for path in (f"models/{made.id}", f"jobs/{made.job_id}"))
    assert "Trained, not approved" in model and "Trained, not approved" in job
    assert (f'action="/console/models/{made.id}/release"' in model) == (not sentence)
    assert ("Serve it anyway" in job or "you can serve it anyway there" in job) == (not sentence)
    assert f'href="/console/models/{made.id}"' in job
    if sentence:
        assert sentence in model and sentence in job
    else:
        assert releases.release(platform, tenant.id, made.id, by="key_a", reason=REASON).released_at is not None


def test_page_of_a_model_whose_report_was_deleted_offers_no_release(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, open_page: Open
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    operated.objects.delete(made.eval_report_key)
    page = open_page(operated, "admin", f"/console/models/{made.id}")
    assert "It cannot be served anyway: the report of its evaluation was deleted; train again." in page and "/release" not in page


EXPERIMENT = {"mode": "experiment"}


def test_experiment_succeeds_without_a_model_until_its_release(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(FAILED, eval_config=EXPERIMENT)
    made = quarantined(operated, tenant, job_id)
    ended = jobs.get(operated, tenant.id, job_id).job
    assert (ended.state, ended.error, ended.adapter_id, ended.fine_tuned_model) == ("succeeded", None, made.id, None)
    with pytest.raises(Conflict) as refused:
        promotions.promote(operated, tenant.id, made.id)
    assert refused.value.message == (
        f"adapter {made.id} cannot be promoted: gate_failed: rule task: its answers are not better than the base model's (task_not_better: "
        f"0.1, needed 0.5). `ft eval {job_id}` shows the numbers; an admin of the tenant can release it: "
        f"`ft adapters release {made.id} --reason ...`"
    )
    released = releases.release(operated, tenant.id, made.id, by="key_a", reason=REASON)
    assert released.stage == "draft", "nobody asked for its promotion"
    job = jobs.get(operated, tenant.id, job_id).job
    assert (job.state, job.fine_tuned_model, job.finished_at) == ("succeeded", made.name, ended.finished_at)
    with operated.engine.connect() as conn:
        told = conn.scalars(sa.select(outbox.c.type).where(outbox.c.subject == job_id)).all()
    assert told.count("fine_tuning.job.succeeded") == 1
    assert promotions.promote(operated, tenant.id, made.id).stage == "production"


def test_experiment_that_passes_waits_for_its_promotion(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(eval_config={**EXPERIMENT, "approval": "required"})
    made = adapter_step.conclude(operated, tenant.id, job_id)
    assert (made.stage, made.approval) == ("draft", "pending")
    job = jobs.get(operated, tenant.id, job_id).job
    assert (job.state, job.fine_tuned_model) == ("succeeded", made.name)
    assert (
        f"passed its gate and is in draft; promote it with `ft promote {made.id}`"
        in jobs.list_events(operated, tenant.id, job_id).items[0].message
    )
    with operated.engine.connect() as conn:
        assert conn.scalars(sa.select(outbox.c.type).where(outbox.c.subject == made.id)).all() == [], (
            "approval is asked for once it is wanted"
        )
    with pytest.raises(Conflict, match="needs_approval"):
        promotions.promote(operated, tenant.id, made.id)
    assert promotions.approve(operated, tenant.id, made.id, by="key_b", and_promote=True).stage == "production"


def test_experiment_is_promoted_after_a_pass_if_it_asks_for_that(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = adapter_step.conclude(operated, tenant.id, evaluated_job(eval_config=EXPERIMENT, auto_promote=True))
    assert made.stage == "production"


def test_experiment_whose_model_changes_nothing_fails(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    job_id = evaluated_job(UNAPPLIED, eval_config=EXPERIMENT)
    quarantined(operated, tenant, job_id)
    job = jobs.get(operated, tenant.id, job_id).job
    assert (job.state, job.error and job.error["code"]) == ("failed", "gate_failed")


def test_a_release_does_not_stand_for_the_approval(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED, eval_config={"approval": "required"}))
    released = releases.release(operated, tenant.id, made.id, by="key_a", reason=REASON)
    assert (released.stage, released.approval) == ("staging", "pending")
    assert promotions.approve(operated, tenant.id, made.id, by="key_b", and_promote=True).stage == "production"


def test_a_release_promotes_only_if_its_job_asks_for_that(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED, auto_promote=False))
    assert releases.release(operated, tenant.id, made.id, by="key_a", reason=REASON).stage == "draft"


@pytest.mark.parametrize("failed", [UNSAFE, UNJUDGED], ids=lambda finding: finding.code)
def test_only_an_operator_releases_a_model_that_failed_the_safety_rule(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, failed: Finding
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED, failed))
    error = refusal(operated, tenant, made)
    assert (error.code, error.http_status) == ("release_refused", 409)
    assert f"needs_operator: {failed.detail}; only an operator may release it" in error.message
    released = releases.release(operated, tenant.id, made.id, by="operator:ops", reason=REASON, by_operator=True)
    assert (released.stage, released.released_by) == ("production", "operator:ops")


@pytest.mark.parametrize("by_operator", [False, True])
def test_an_adapter_that_changes_nothing_is_not_released(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, *, by_operator: bool
) -> None:
    made = quarantined(operated, tenant, evaluated_job(UNAPPLIED))
    assert "gate_failed: difference 0; train again" in refusal(operated, tenant, made, by_operator=by_operator).message


def test_files_that_changed_are_not_released(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    operated.objects.put_bytes(f"{made.object_prefix}/adapter_config.json", b"{}")
    assert refusal(operated, tenant, made, by_operator=True).code == "integrity_error"


def test_a_whole_model_is_compared_with_its_base_again_before_its_release(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    broken = quarantined(operated, tenant, evaluated_job(FAILED, whole=True, broken=True, seed=1))
    assert "shape_mismatch: num_hidden_layers" in refusal(operated, tenant, broken, by_operator=True).message
    whole = quarantined(operated, tenant, evaluated_job(FAILED, whole=True, seed=2))
    assert releases.release(operated, tenant.id, whole.id, by="key_a", reason=REASON).stage == "draft"


def test_a_deleted_report_leaves_the_reasons_out(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    (failed,) = promotions.failed_rules(operated, made)
    assert failed.sentence.startswith("its answers are not better than the base model's (task_not_better: 0.1")
    operated.objects.delete(made.eval_report_key)
    assert promotions.failed_rules(operated, made) == []
    with pytest.raises(NotFound):
        releases.release(operated, tenant.id, made.id, by="key_a", reason=REASON)


def test_advice_for_a_job_that_ended_as_an_earlier_one_is_that_of_the_earlier_one(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    first = jobs.get(operated, tenant.id, made.job_id).job
    second = replace(first, id="ftjob-second", reused_job_id=first.id)
    assert next_run.advice(operated, tenant.id, second) == next_run.advice(operated, tenant.id, first) == (LONGER,)


def test_operators_can_keep_releases_to_themselves(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    strict = replace(operated, settings=replace(operated.settings, release_policy="operator"))
    made = quarantined(strict, tenant, evaluated_job(FAILED))
    assert "needs_operator: here only operators release models" in refusal(strict, tenant, made).message
    assert releases.release(strict, tenant.id, made.id, by="operator:ops", reason=REASON, by_operator=True).stage == "production"


@pytest.mark.parametrize("reason", ["", " \n", "x" * 2001])
def test_a_release_needs_a_reason(operated: Platform, tenant: Tenant, evaluated_job: Evaluate, reason: str) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    assert refusal(operated, tenant, made, reason=reason).code == "invalid_reason"


def test_a_model_that_passed_needs_no_release(operated: Platform, tenant: Tenant, evaluated_job: Evaluate) -> None:
    made = adapter_step.conclude(operated, tenant.id, evaluated_job())
    assert "stage: it is production, and only a quarantined one needs a release" in refusal(operated, tenant, made).message


@pytest.mark.parametrize("stage", ["draft", "production"])
def test_the_database_lets_no_adapter_out_of_quarantine_without_a_release(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, stage: str
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    with pytest.raises(IntegrityError), operated.engine.begin() as conn:
        conn.execute(sa.update(adapters_table).where(adapters_table.c.id == made.id).values(stage=stage, promoted_at=operated.clock()))
