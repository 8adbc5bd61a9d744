"""Evaluations as the platform runs them: real processes on a tiny model, adopted, gone on with, their answers kept."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.evaluations import answer_cache, reports
from control_plane.evaluations.tables import eval_scores
from control_plane.jobs.service import cancel
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import FtError
from engine.data.schema import Example, Message
from engine.evals.config import parse_eval_config
from engine.evals.run import run_file
from engine.evals.run.run_file import EvalRun
from engine.evals.scoring.judge import JudgeSettings
from engine.evals.suites import suite_items
from engine.evals.suites.answer_metrics import token_f1
from ft_assets.adapters import step as adapter_step
from ft_assets.evals import step as evaluation_step
from resources.launcher import LocalLauncher
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_evaluations import Following, following, out_dir
from tests.support.models.tiny_model import build_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("real") / "tiny-base")


@pytest.fixture
def platform(fresh_platform: Platform, real_base: Path) -> Platform:
    """With a base model that has weights."""
    entry = {"id": "tiny-base", "path": str(real_base), "license": "Apache-2.0"}
    return replace(fresh_platform, models=Catalogue({"tiny-base": (entry, real_base)}))


@pytest.fixture
def evaluations(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with following(platform, LocalLauncher(platform.settings.work_dir / "launcher")) as made:
        yield made


def processes(platform: Platform, job_id: str) -> list[str]:
    return sorted(p.name for p in (platform.settings.work_dir / "launcher").glob(f"{job_id}-a*"))


def result_of(platform: Platform, evaluated: reports.Evaluated) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(platform.objects.get_bytes(evaluated.key.replace("report.json", run_file.RESULT_NAME)))
    return body


def cached(result: Mapping[str, Any], subject: str) -> dict[str, bool]:
    return {suite: section["cached"] for suite, section in result["subjects"][subject].items()}


@pytest.mark.slow
def test_one_lineage_from_its_first_adapter_to_its_second(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    """The first adapter is accepted; the second stands beside it, on the same items, and what is known is not asked again."""
    asked = {"skip": ["golden", "task", "perplexity", "safety"]}
    first = evaluating_job(platform, tenant.id, write_chat_rows(), seed=1, suffix="support", eval_config=asked)
    done = evaluations.evaluate(tenant.id, first)
    assert done.verdict.passed, done.verdict
    result = result_of(platform, done)
    assert result["subjects"]["previous"] is None
    assert not any(cached(result, "base").values())
    rows = [json.loads(line) for line in platform.objects.get_bytes(done.samples_key).splitlines()]
    assert {row["suite"] for row in rows} >= {"holdout", "golden"}
    assert all({"id", "prompt", "expected", "base", "adapter", "previous", "scores"} <= row.keys() for row in rows)
    with platform.engine.connect() as conn:
        events = conn.execute(sa.select(job_events).where(job_events.c.job_id == first).order_by(job_events.c.seq)).all()
        progress = conn.execute(sa.select(jobs.c.evaluation).where(jobs.c.id == first)).scalar_one()
    told = [e for e in events if e.code in ("evaluation_started", "evaluation_progress")]
    assert [e.code for e in told] == ["evaluation_started", *["evaluation_progress"] * 2 * len(result["suites"])]
    assert progress["total"] == 2 * sum(len(s["answers"]) for s in result["subjects"]["base"].values())
    record = adapter_step.conclude(platform, tenant.id, first)
    assert record.stage == "production"

    second = evaluating_job(platform, tenant.id, write_chat_rows(), seed=2, suffix="support", eval_config=asked)
    done = evaluations.evaluate(tenant.id, second)
    result = result_of(platform, done)
    assert all(cached(result, "base").values()), "the same items, the same base"
    assert all(cached(result, "previous").values()), "what it answered as a candidate"
    assert not any(cached(result, "adapter").values())
    assert done.report.score("validation", "perplexity").previous is not None  # type: ignore[union-attr]
    assert all(line["previous"] is not None for line in map(json.loads, platform.objects.get_bytes(done.samples_key).splitlines()))

    other = evaluating_job(platform, tenant.id, write_chat_rows(salt=" Say"), seed=3, suffix="another", eval_config=asked)
    result = result_of(platform, evaluations.evaluate(tenant.id, other))
    assert result["subjects"]["previous"] is None, "another lineage"
    assert cached(result, "base") == {"golden": True, "holdout": False, "validation": False}
    with platform.engine.connect() as conn:
        owners = conn.execute(sa.select(eval_scores.c.suite, eval_scores.c.tenant_id).where(eval_scores.c.subject_digest.notlike("%+%")))
        assert {(suite, owner is None) for suite, owner in owners} == {("golden", True), ("holdout", False), ("validation", False)}


@pytest.mark.slow
def test_a_scored_suite_is_answered_by_base_and_adapter_and_stands_in_report_and_samples(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"it is {n}"}]} for n in range(9)]
    stream = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    scoring = Scoring(metric="token_f1", min_score=1.0)
    scored_suites.add(platform, tenant.id, stream, name="numbers", filename="numbers.jsonl", scoring=scoring)
    asked = {"suites": ["numbers"], "skip": ["golden", "task", "perplexity", "safety"]}
    job_id = evaluating_job(platform, tenant.id, write_chat_rows(), eval_config=asked)
    done = evaluations.evaluate(tenant.id, job_id)
    assert done.verdict.reasons == ("suite_below_limit",)
    (score,) = [s for s in done.report.scores if s.suite == "suite/numbers"]
    assert (score.metric, score.n) == ("token_f1", 9)
    result = result_of(platform, done)
    for name, value in (("base", score.base), ("adapter", score.adapter)):
        answers = result["subjects"][name]["suite/numbers"]["answers"]
        expected = {item.id: item.expected or "" for item in scored_suites.asked(platform, tenant.id, parse_eval_config(asked))[0].items}
        assert value == pytest.approx(sum(token_f1(answers[id_], wanted) for id_, wanted in expected.items()) / 9)
    shown = [row for row in map(json.loads, platform.objects.get_bytes(done.samples_key).splitlines()) if row["suite"] == "suite/numbers"]
    assert {(row["prompt"], row["expected"]) for row in shown} == {(f"Say {n}", f"it is {n}") for n in range(9)}
    assert all(row["adapter"] == result["subjects"]["adapter"]["suite/numbers"]["answers"][row["id"]] for row in shown)
    with platform.engine.connect() as conn:
        owners = set(conn.execute(sa.select(eval_scores.c.tenant_id).where(eval_scores.c.suite == "suite/numbers")).scalars())
    assert owners == {tenant.id}, "a tenant's rows, and what the base says to them, are the tenant's"


@pytest.mark.slow
def test_a_finished_evaluation_is_not_run_again(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows())
    first = evaluations.evaluate(tenant.id, job_id)
    assert not out_dir(platform, job_id).exists(), "what was stored needs no work directory"
    assert evaluations.evaluate(tenant.id, job_id) == first
    assert len(processes(platform, job_id)) == 1
    asked = replace(evaluations.platform, settings=replace(evaluations.platform.settings, eval_suites=("standin_copy",)))
    again = evaluation_step.evaluate(asked, evaluations.launcher, tenant.id, job_id)
    assert len(processes(platform, job_id)) == 1, "what was asked stands, whatever the operator configures later"
    assert again == first


STEP = """
import sys
from ft_assets.evals import step as evaluation
from control_plane.platform.context import Platform
from core.base_models import Catalogue
from control_plane.platform.settings import load
from resources.database.engine import make_logins
from resources.launcher import LocalLauncher
from resources.object_store import LocalObjectStore
from pathlib import Path
home, url, api, tenant, job_id, base = sys.argv[1:]
settings = load({"FT_HOME": home, "FT_DATABASE_URL": url, "FT_INTERNAL_URL": api})
models = Catalogue({"tiny-base": ({"id": "tiny-base", "path": base, "license": "Apache-2.0"}, Path(base))})
platform = Platform(
    logins=make_logins(url), objects=LocalObjectStore(settings.home / "objects"), models=models, fleet=None, settings=settings
)
evaluation.evaluate(platform, LocalLauncher(settings.work_dir / "launcher"), tenant, job_id)
"""


@pytest.mark.slow
def test_a_step_that_is_killed_leaves_a_process_that_the_next_one_adopts(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path], real_base: Path
) -> None:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows())
    assert evaluations.reserve(tenant.id, job_id) is not None
    url = platform.engine.url.render_as_string(hide_password=False)
    api, launcher = evaluations.platform.settings.internal_url, evaluations.launcher
    argv = [sys.executable, "-c", STEP, str(platform.settings.home), url, api, tenant.id, job_id, str(real_base)]
    step = subprocess.Popen(argv, cwd=ROOT)
    wait_for(lambda: bool(processes(platform, job_id)) and launcher.get(processes(platform, job_id)[0]).phase is WorkloadPhase.RUNNING)
    step.kill()
    step.wait(timeout=20)
    (name,) = processes(platform, job_id)
    assert launcher.get(name).phase is WorkloadPhase.RUNNING
    assert json.loads((platform.settings.work_dir / "launcher" / name / "launch.json").read_text())["env"]["CUDA_VISIBLE_DEVICES"] == ""
    evaluated = evaluations.evaluate(tenant.id, job_id)
    assert processes(platform, job_id) == [name]
    assert evaluated.report.adapter_applied


@pytest.mark.slow
def test_a_process_that_is_killed_is_gone_on_from(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows())
    killed = threading.Event()

    def kill_once() -> None:
        wait_for((out_dir(platform, job_id) / run_file.JOURNAL_NAME).exists)
        wait_for(lambda: (out_dir(platform, job_id) / run_file.JOURNAL_NAME).stat().st_size > 0)
        status = json.loads((platform.settings.work_dir / "launcher" / processes(platform, job_id)[0] / "process.json").read_text())
        os.killpg(status["pid"], signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill_once)
    killer.start()
    evaluated = evaluations.evaluate(tenant.id, job_id)
    killer.join()
    assert killed.is_set()
    assert len(processes(platform, job_id)) == 2
    assert evaluated.report.adapter_applied
    with platform.engine.connect() as conn:
        query = sa.select(job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.code == "evaluation_progress")
        told = [(d["subject"], d["suite"]) for d in conn.execute(query).scalars()]
    assert len(told) == len(set(told)), "each suite is told once"


def test_a_cancelled_job_ends_its_evaluation(
    platform: Platform, evaluations: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows())

    def cancel_when_it_runs() -> None:
        wait_for((out_dir(platform, job_id) / run_file.HEARTBEAT_NAME).exists)
        cancel(platform, tenant.id, job_id)

    canceller = threading.Thread(target=cancel_when_it_runs)
    canceller.start()
    with pytest.raises(FtError) as stopped:
        evaluations.evaluate(tenant.id, job_id)
    canceller.join()
    assert stopped.value.code == "evaluation_stopped"
    assert [evaluations.launcher.get(name).phase for name in processes(platform, job_id)] == [WorkloadPhase.EXITED]
    assert evaluations.outcomes(job_id) == ["cancelled"]
    assert evaluations.state(tenant.id, job_id) is JobState.CANCELLED


def test_what_is_asked_follows_from_the_operator_and_the_job(platform: Platform) -> None:
    from engine.evals.config import parse_eval_config
    from engine.evals.suites.suite_items import Item

    settings = replace(platform.settings, eval_suites=("a",), judge_url="http://j/v1", judge_model="m", safety_classifier="builtin")
    letter = [Item(id="1", messages=(), expected="yes")]
    prose = [Item(id="1", messages=(), expected="many words " * 20)]

    def asked_of(**asked: Any) -> EvalRun:
        run = EvalRun(base_model_dir=Path("base"), adapter_dir=None, out_dir=Path("out"))
        return evaluation_step._with_suites(run, settings, parse_eval_config(asked))

    def judge_of(items: list[Item], **asked: Any) -> JudgeSettings | None:
        return evaluation_step._judge(settings, parse_eval_config(asked), items, ("tiny-base", None))

    assert (asked_of().capability, asked_of().safety, judge_of(letter)) == (("a",), True, None)
    assert asked_of(capability=["b"]).capability == ("b",)
    assert asked_of(skip=["capability", "safety"]).capability == ()
    assert asked_of(skip=["safety"]).safety is False
    assert judge_of(prose) == JudgeSettings(url="http://j/v1", model="m", family=settings.judge_family, others=("tiny-base",))
    assert judge_of(prose, judge=False) is None
    told = judge_of(letter, judge=True)
    assert told is not None and told.max_items == 50


def test_a_row_that_offers_tools_is_asked_with_them() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    turns = (Message(role="user", content="rain?"), Message(role="assistant", content="no"))
    row = Example(kind="chat", messages=turns, tools=(tool,)).as_row()
    assert suite_items.holdout_items([row])[0].tools == (tool,)


def test_a_judge_is_held_against_where_the_base_comes_from(platform: Platform, real_base: Path) -> None:
    entry = {"id": "tiny-base", "path": str(real_base), "license": "Apache-2.0", "repo": "meta-llama/Llama-3.1-8B"}
    renamed = replace(platform, models=Catalogue({"tiny-base": (entry, real_base)}))
    job = SimpleNamespace(metadata={"generated_by": "gpt-4o"})
    judged = SimpleNamespace(base_model="tiny-base", job=job)
    assert evaluation_step._compared(renamed, judged) == ("tiny-base", "meta-llama/Llama-3.1-8B", "gpt-4o")  # type: ignore[arg-type]


def test_an_adapters_digest_names_its_base_too() -> None:
    assert answer_cache.manifest_of({"digests": {"previous": answer_cache.subject_digest("b", "m")}}) == "m"
    assert answer_cache.manifest_of({"digests": {"base": "b"}}) is None


def wait_for(met: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)
