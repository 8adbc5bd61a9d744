"""Evaluations whose answers a judge and a guard model review: in the control plane, after the workload; its process is a scripted one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from control_plane.billing import refunds
from control_plane.evaluations import reports
from control_plane.evaluations import service as orders
from control_plane.evaluations.kept_verdicts import KeptVerdicts
from control_plane.evaluations.review_progress import ReviewProgress
from control_plane.jobs.service import cancel
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.settings import load
from control_plane.queue.tables import reservations
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import Conflict, InvalidRequest, Unavailable
from core.retries import RetryPolicy
from engine.evals.suites import safety
from engine.evals.suites.endpoint import JUDGE_KEY, SAFETY_KEY
from ft_assets.evals import step
from tests.control_plane.evaluations.test_evaluation_attempts import Evaluated
from tests.control_plane.evaluations.test_evaluations import new_adapter
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_evaluations import following, out_dir
from tests.support.jobs.followed_jobs import Scripted, until
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.scripted_evaluation import GO, HOLD
from tests.support.servers.chat_server import Body, ChatServer, chat_server

ROOT = Path(__file__).parents[3]
ASKED = {"skip": ["golden"], "judge": True}


@pytest.fixture(scope="module")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("real") / "tiny-base")


class Judge:
    """Prefers what a job's rows want, once it may say so."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.answered: set[str] = set()
        """Requests on which it has answered, or may answer though it is closed."""
        self._lock = threading.Lock()

    def __call__(self, body: Body) -> str:
        shown = body["messages"][-1]["content"]
        with self._lock:
            if len(self.answered) < 2:
                self.answered.add(request_of(body))
        if request_of(body) not in self.answered:
            self.open.wait(60)
        first = shown.split("<answer_A>")[1].split("</answer_A>")[0]
        return json.dumps({"reason": "it is right", "verdict": "A" if "It is" in first else "B"})


def request_of(body: Body) -> str:
    return str(body["messages"][-1]["content"]).split("</request>")[0]


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def judge_server(judge: Judge) -> Iterator[ChatServer]:
    with chat_server(judge) as server:
        yield server
        judge.open.set()


@pytest.fixture
def guard_server() -> Iterator[ChatServer]:
    """Reads Llama Guard's prompt, and finds the answers to the first request unsafe."""
    first = str(safety.items()[0].messages[-1]["content"])

    def judged(body: Body) -> str:
        (turn,) = body["messages"]
        assert "<BEGIN UNSAFE CONTENT CATEGORIES>" in turn["content"]
        return "unsafe\nS9,S2" if f"User: {first}\n\nAgent: " in turn["content"] else "safe"

    with chat_server(judged) as server:
        yield server


@pytest.fixture
def platform(fresh_platform: Platform, real_base: Path, judge_server: ChatServer, guard_server: ChatServer) -> Platform:
    """With both, and a base model that has weights."""
    entry = {"id": "tiny-base", "path": str(real_base), "license": "Apache-2.0"}
    configured = {
        "judge_url": judge_server.url,
        "judge_model": "some-judge",
        "safety_classifier": f"llama-guard:{guard_server.url}#some-guard",
    }
    settings = replace(fresh_platform.settings, **configured)  # type: ignore[arg-type]
    return replace(fresh_platform, models=Catalogue({"tiny-base": (entry, real_base)}), settings=settings)


@pytest.fixture
def job(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> Iterator[Evaluated]:
    """A trained job that waits for its evaluation."""
    job_id = evaluating_job(platform, tenant.id, write_chat_rows(), eval_config=ASKED)
    with following(platform, Scripted(platform.settings.work_dir / "launcher")) as made:
        yield Evaluated(following=made, tenant=tenant.id, id=job_id)


def progress(job: Evaluated) -> dict[str, Any]:
    found = job.column("evaluation")
    return found if isinstance(found, dict) else {}


def kept(job: Evaluated) -> KeptVerdicts:
    return KeptVerdicts(objects=job.platform.objects, prefix=reports.verdicts_prefix(reports.report_key(job.tenant, job.id)))


def num_judged(job: Evaluated) -> int:
    return sum("forward" in verdict for verdict in kept(job).read().values())


def holds_a_gpu(job: Evaluated) -> bool:
    held = sa.select(reservations.c.attempt).where(reservations.c.job_id == job.id, reservations.c.released_at.is_(None))
    with job.platform.engine.connect() as conn:
        return conn.execute(held).first() is not None


def test_answers_are_classified_and_compared_after_the_workload_and_the_tenant_sees_it(
    job: Evaluated, judge_server: ChatServer, guard_server: ChatServer
) -> None:
    job.tell(GO)
    report = job.evaluate().report
    assert report.classifiers == tuple(sorted({safety.RULE_NAME, safety.classifier_id(f"llama-guard:{guard_server.url}#some-guard")}))
    assert report.unclassified == 0
    assert report.unsafe_categories == {"base": {"S2": 1, "S9": 1}, "adapter": {"S2": 1, "S9": 1}}
    assert report.judge is not None and report.judge.wins == report.judge.n > 2
    assert len(judge_server.requests) == 2 * report.judge.n
    with job.platform.engine.connect() as conn:
        query = sa.select(job_events.c.data).where(job_events.c.job_id == job.id, job_events.c.code == "evaluation_progress")
        told = [data for data in conn.execute(query.order_by(job_events.c.seq)).scalars() if data["kind"] == "judged"]
    assert told == [{"kind": "judged", "num_items": report.judge.n, "failed": 0}]
    assert (progress(job)["phase"], progress(job)["subject"]) == ("done", None)
    asked = len(judge_server.requests), len(guard_server.requests)
    assert job.evaluate().report == report
    assert (len(judge_server.requests), len(guard_server.requests)) == asked, "a step that is replaced asks nothing again"


def test_a_model_whose_base_refuses_too_little_passes_unless_the_operator_blocks_it(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    """The guard finds one of 62 answers of each model unsafe, which misses a bar of 99 %."""
    strict = replace(platform, settings=replace(platform.settings, safety_policy="block"))
    job_id = evaluating_job(platform, tenant.id, write_chat_rows(), eval_config={**ASKED, "min_refusal_share": 0.99})
    with following(platform, Scripted(platform.settings.work_dir / "launcher")) as made:
        job = Evaluated(following=made, tenant=tenant.id, id=job_id)
        job.tell(GO)
        allowed = job.evaluate().verdict
        blocked = step.evaluate(strict, made.launcher, tenant.id, job_id).verdict
    assert "safety_not_judged" in allowed.warnings
    assert (blocked.outcome, "safety_not_judged" in blocked.reasons) == ("quarantined", True)
    assert "safety not judged: the base refuses 61 of 62 unsafe prompts" in blocked.why_not


@pytest.mark.parametrize(
    ("env", "words"),
    [({"FT_SAFETY_POLICY": "maybe"}, "use allow or block"), ({"FT_SAFETY_POLICY": "block", "FT_SAFETY_CLASSIFIER": "off"}, "builtin")],
)
def test_a_safety_policy_that_no_model_could_pass_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(env)


def test_a_workload_knows_neither_the_addresses_nor_the_keys_of_judge_and_guard(
    job: Evaluated, judge_server: ChatServer, guard_server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JUDGE_KEY, "the-key-of-the-judge")
    monkeypatch.setenv(SAFETY_KEY, "the-key-of-the-guard")
    job.tell(HOLD)
    waiting = threading.Thread(target=job.evaluate, daemon=True)
    waiting.start()
    until(lambda: job.pids())
    process = psutil.Process(job.pids()[0])
    run_file = (out_dir(job.platform, job.id) / "run.json").read_text()
    assert json.loads(run_file)["classifier"].startswith("some-guard (")
    seen = [run_file, *(str(p.environ()) for p in (process, *process.parents()[:1]))]
    seen += [path.read_text() for path in (job.platform.settings.work_dir / "launcher" / f"{job.id}-a1").rglob("*.json")]
    assert len(seen) > 4
    for text in seen:
        for secret in (judge_server.url, guard_server.url, JUDGE_KEY, SAFETY_KEY, "the-key-of"):
            assert secret not in text
    job.tell(GO)
    (job.job_dir / HOLD).unlink()
    waiting.join(timeout=60)
    assert set(judge_server.keys) == {"Bearer the-key-of-the-judge"}
    assert set(guard_server.keys) == {"Bearer the-key-of-the-guard"}


STEP = """
import sys
from pathlib import Path
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from core.base_models import Catalogue
from ft_assets.evals import step
from resources.database.engine import make_logins
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import Scripted
home, url, api, judge_url, guard, tenant, job_id, base = sys.argv[1:]
settings = load({
    "FT_HOME": home, "FT_DATABASE_URL": url, "FT_INTERNAL_URL": api, "FT_JUDGE_URL": judge_url, "FT_JUDGE_MODEL": "some-judge",
    "FT_SAFETY_CLASSIFIER": guard,
})
models = Catalogue({"tiny-base": ({"id": "tiny-base", "path": base, "license": "Apache-2.0"}, Path(base))})
objects = LocalObjectStore(settings.home / "objects")
platform = Platform(logins=make_logins(url), objects=objects, models=models, fleet=None, settings=settings)
step.evaluate(platform, Scripted(settings.work_dir / "launcher"), tenant, job_id)
"""


@pytest.mark.slow
def test_a_step_that_is_killed_while_judging_is_gone_on_from_without_a_gpu(
    job: Evaluated, judge: Judge, judge_server: ChatServer, guard_server: ChatServer, real_base: Path
) -> None:
    judge.open.clear()
    job.tell(GO)
    assert job.following.reserve(job.tenant, job.id) is not None
    settings, url = job.platform.settings, job.platform.engine.url.render_as_string(hide_password=False)
    argv = [
        str(settings.home),
        url,
        settings.internal_url,
        judge_server.url,
        settings.safety_classifier,
        job.tenant,
        job.id,
        str(real_base),
    ]
    process = subprocess.Popen([sys.executable, "-c", STEP, *argv], cwd=ROOT)
    until(lambda: num_judged(job) == 2)
    assert (progress(job)["phase"], progress(job)["suite"]) == ("judging", "holdout")
    assert not holds_a_gpu(job) and job.outcomes() == ["succeeded"]
    process.kill()
    process.wait(timeout=20)
    judged, guarded = set(judge.answered), len(guard_server.requests)
    judge_server.requests.clear()
    judge.open.set()
    report = job.evaluate().report
    assert report.judge is not None and report.judge.failed == 0
    again = {request_of(body) for body in judge_server.requests}
    assert len(judged) == 2 and not judged & again
    assert len(again) == report.judge.n - 2
    assert len(guard_server.requests) == guarded, "nor is the guard asked again"
    assert len(job.pids()) == 1


@pytest.mark.slow
def test_a_guard_that_is_away_for_a_moment_costs_no_second_evaluation(job: Evaluated, guard_server: ChatServer) -> None:
    guard_server.statuses = [401]
    job.tell(GO)
    assert job.evaluate().report.unclassified == 0
    assert (len(job.pids()), job.outcomes()) == (1, ["succeeded"])


@pytest.mark.slow
def test_a_guard_that_stays_away_ends_the_job_with_its_error(job: Evaluated, guard_server: ChatServer) -> None:
    guard_server.statuses = [401] * 1000
    job.tell(GO)
    assert job.following.reserve(job.tenant, job.id) is not None
    with pytest.raises(Unavailable):
        step.evaluate(job.platform, job.following.launcher, job.tenant, job.id, retries=RetryPolicy(first_s=0.01, give_up_s=0.1))
    assert 1 < len(guard_server.requests) < 100
    assert job.following.state(job.tenant, job.id) is JobState.FAILED
    assert job.following.error(job.id)["code"] == "classifier_unavailable"
    assert (len(job.pids()), job.outcomes()) == (1, ["succeeded"])
    cases = refunds.list_cases(job.platform, tenant=job.tenant).items
    assert [(case.job_id, case.attempt, case.outcome) for case in cases] == [(job.id, 1, "classifier_unavailable")], (
        "its GPU time was billed"
    )


@pytest.mark.slow
def test_a_classifier_that_cannot_be_loaded_is_the_platforms_fault(job: Evaluated) -> None:
    job.tell(GO)
    assert job.following.reserve(job.tenant, job.id) is not None
    broken = replace(job.platform, settings=replace(job.platform.settings, safety_classifier="no_such_module:x"))
    with pytest.raises(InvalidRequest):
        step.evaluate(broken, job.following.launcher, job.tenant, job.id)
    failed = sa.select(job_events.c.data["fault"].astext).where(job_events.c.job_id == job.id, job_events.c.data.has_key("fault"))
    with job.platform.engine.connect() as conn:
        assert conn.execute(failed).scalars().all() == ["platform"]
    assert job.following.error(job.id)["code"] == "invalid_classifier"
    assert [case.outcome for case in refunds.list_cases(job.platform, tenant=job.tenant).items] == ["invalid_classifier"]


@pytest.mark.slow
def test_a_judge_that_is_away_is_part_of_the_report(job: Evaluated, judge_server: ChatServer) -> None:
    judge_server.statuses = [401] * 1000
    job.tell(GO)
    report = job.evaluate().report
    assert report.judge is not None and (report.judge.error, report.judge.n) == ("judge_failed", 0)
    assert (len(job.pids()), job.outcomes()) == (1, ["succeeded"])


@pytest.mark.slow
def test_a_job_that_is_cancelled_is_judged_no_further(job: Evaluated, judge: Judge, judge_server: ChatServer) -> None:
    judge.open.clear()
    job.tell(GO)

    def cancel_while_judging() -> None:
        until(lambda: num_judged(job) == 2)
        cancel(job.platform, job.tenant, job.id)
        judge.open.set()

    canceller = threading.Thread(target=cancel_while_judging)
    canceller.start()
    with pytest.raises(Conflict) as stopped:
        job.evaluate()
    canceller.join()
    assert stopped.value.code == "evaluation_stopped"
    assert num_judged(job) == 2
    assert job.following.state(job.tenant, job.id) is JobState.CANCELLED


def test_an_ordered_evaluation_that_cannot_be_reviewed_fails_with_the_error(platform: Platform, tenant: Tenant) -> None:
    order = orders.request(platform, tenant.id, new_adapter(platform, tenant, base_digest=platform.models.get("tiny-base").digest))
    begin(platform, order.id)
    review = ReviewProgress(platform=platform, tenant=tenant.id, job_id=order.job_id, evaluation_id=order.id)
    review.must_be_wanted()
    review.show("judging", "adapter", "holdout")
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(jobs.c.evaluation).where(jobs.c.id == order.job_id)).scalar() is None, "its job shows its own"
    review.fail(Unavailable("away", code="classifier_unavailable"))
    found = orders.find(platform, order.id)
    assert (found.state, found.error and found.error["code"]) == ("failed", "classifier_unavailable")
    with pytest.raises(Conflict):
        review.must_be_wanted()
