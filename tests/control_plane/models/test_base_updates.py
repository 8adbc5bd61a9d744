"""Other bytes for a base model's id: staged, held back by the adapters in production, switched to; the old ones stay for who needs them."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import yaml
from safetensors.numpy import load_file, save_file

from control_plane.evaluations import service as evaluations
from control_plane.evaluations.reports import Evaluated
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.models import base_updates, catalogue
from control_plane.models.catalogue import Given, add_local
from control_plane.models.operator_catalogue import edited
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.base_models import BaseModel, catalogue_file
from core.errors import Conflict, IntegrityError, InvalidRequest, NotFound
from deploy.local.stack_services import DEMO_MODEL, demo_model_dir
from engine.evals.config import EvalConfig
from engine.evals.gate.verdict import Finding, Verdict
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.model_hub import SHA, running_model_hub

FAILED = Finding(rule="task", code="task_not_better", passed=False, blocking=True, detail="0.1, needed 0.5")
RULES = EvalConfig()


def variant(directory: Path, source: Path, *, scale: float = 0.01, seed: int = 1) -> Path:
    """`source` with noise on its weights, as a further training of it would leave it."""
    shutil.copytree(source, directory)
    rng = np.random.default_rng(seed)
    weights = load_file(source / "model.safetensors")
    noisy = {k: v + (rng.standard_normal(v.shape) * scale * v.std()).astype(v.dtype) for k, v in weights.items()}
    save_file(noisy, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Base:
    """A base model of its own, with its platform, and ways to put adapters into production on it."""

    def __init__(self, platform: Platform, tenant: Tenant, directory: Path) -> None:
        self.platform, self.tenant, self.dir = platform, tenant, directory
        self.id = f"acme/{uuid.uuid4().hex[:8]}"
        self.old: BaseModel = add_local(platform.settings, self.id, directory, Given(license="MIT", context_length=256))

    def adapter(self, **changes: Any) -> str:
        name = f"ft:{self.id}:{self.tenant.id}:x:{uuid.uuid4().hex[:8]}"
        values = {"stage": "production", "loaded": False, "base_model": self.id, "base_digest": self.old.digest}
        return add_adapter(self.platform, self.tenant.id, name=name, **(values | changes))

    def judge(self, evaluation_id: str | None, *findings: Finding) -> None:
        held = begin(self.platform, str(evaluation_id))
        outcome: Any = "quarantined" if findings else "passed"
        report: Any = None
        found = Evaluated(report=report, verdict=Verdict(outcome=outcome, findings=findings), advice=(), key="k")
        with self.platform.engine.begin() as conn:
            assert evaluations.finish(conn, held, **evaluations.verdict_columns(found, RULES, self.platform.clock()))

    def entry(self) -> dict[str, Any]:
        body = yaml.safe_load(catalogue_file(self.platform.settings.models_dir).read_text())
        return next(e for e in body["models"] if e["id"] == self.id)


@pytest.fixture
def base(platform: Platform, tenant: Tenant, tmp_path: Path) -> Base:
    settings = replace(platform.settings, home=tmp_path / "home")
    operated = replace(platform, settings=settings, models=catalogue.catalogue_of(settings))
    return Base(operated, tenant, build_tiny_model(tmp_path / "old"))


@pytest.fixture
def new(base: Base, tmp_path: Path) -> Path:
    return variant(tmp_path / "new", base.dir)


def test_an_update_waits_for_every_production_adapter_and_then_goes_through(base: Base, new: Path) -> None:
    good, bad = base.adapter(), base.adapter()
    base.adapter(stage="draft")
    platform = base.platform
    staged = base_updates.stage_local(platform, base.id, new)
    assert staged.staged is not None
    assert [a.state for a in staged.adapters] == ["not evaluated"] * 2, "a draft is not in the way"
    assert platform.models.get(base.id).digest == base.old.digest
    with pytest.raises(Conflict, match="ft admin models evaluate") as blocked:
        base_updates.apply(platform, base.id)
    assert blocked.value.code == "base_update_blocked"
    ordered = {a.adapter_id: a for a in base_updates.evaluate(platform, base.id).adapters}
    assert {a.state for a in ordered.values()} == {"running"}
    assert base_updates.evaluate(platform, base.id).adapters == tuple(base_updates.status(platform, base.id).adapters)
    base.judge(ordered[good].evaluation_id)
    base.judge(ordered[bad].evaluation_id, FAILED)
    with pytest.raises(Conflict, match=r"1 production adapters .* failed \(task_not_better\)"):
        base_updates.apply(platform, base.id)
    second = base_updates.evaluate(platform, base.id, again=True)
    base.judge(next(a.evaluation_id for a in second.adapters if a.adapter_id == bad))
    done = base_updates.apply(platform, base.id)
    assert (done.digest, done.staged, done.previous, done.blocking) == (staged.staged, None, (base.old.digest,), ())
    now = platform.models.get(base.id, fresh=True)
    assert (now.directory, now.license, now.context_length) == (new, "MIT", 256)
    assert [h["what"] for h in base.entry()["history"]] == ["staged", "applied"]
    assert base.entry()["history"][1]["adapters"] == sorted(
        [good, bad], key=lambda a: next(x.name for x in done.adapters if x.adapter_id == a)
    )
    assert base_updates.stage_local(platform, base.id, new) == done, "the same command again finds it done"


def test_without_production_adapters_nothing_is_in_the_way_and_a_deprecated_one_is_not_either(base: Base, new: Path) -> None:
    adapter = base.adapter()
    base_updates.stage_local(base.platform, base.id, new)
    with pytest.raises(Conflict):
        base_updates.apply(base.platform, base.id)
    with base.platform.engine.begin() as conn:
        conn.execute(sa.text("UPDATE adapters SET stage = 'deprecated', deprecated_at = now() WHERE id = :i"), {"i": adapter})
    assert base_updates.apply(base.platform, base.id).previous == (base.old.digest,)


def test_bytes_that_no_adapter_fits_are_refused_when_they_are_staged(base: Base, tmp_path: Path) -> None:
    wider = variant(tmp_path / "wider", base.dir)
    weights = load_file(wider / "model.safetensors")
    weights["lm_head.weight"] = np.zeros((7, 64), np.float32)
    save_file(weights, wider / "model.safetensors")
    heads = variant(tmp_path / "heads", base.dir)
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    for directory, why in ((wider, "lm_head.weight, 7x64 instead of 260x64"), (heads, "num_attention_heads 8 instead of 4")):
        with pytest.raises(InvalidRequest, match=why) as refused:
            base_updates.stage_local(base.platform, base.id, directory)
        assert refused.value.code == "base_update_incompatible"
    assert "next" not in base.entry()


def test_another_template_is_refused_only_while_adapters_are_in_production(base: Base, tmp_path: Path) -> None:
    other = variant(tmp_path / "other", base.dir)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    adapter = base.adapter()
    with pytest.raises(InvalidRequest, match="template"):
        base_updates.stage_local(base.platform, base.id, other)
    with base.platform.engine.begin() as conn:
        conn.execute(sa.text("UPDATE adapters SET stage = 'staging' WHERE id = :i"), {"i": adapter})
    assert base_updates.stage_local(base.platform, base.id, other).staged is not None


def test_one_update_at_a_time_and_what_is_staged_can_be_dropped(base: Base, new: Path, tmp_path: Path) -> None:
    base_updates.stage_local(base.platform, base.id, new)
    with pytest.raises(Conflict) as busy:
        base_updates.stage_local(base.platform, base.id, variant(tmp_path / "third", base.dir, seed=2))
    assert busy.value.code == "update_staged"
    with pytest.raises(Conflict, match="stands for these bytes already, and others are staged") as present:
        base_updates.stage_local(base.platform, base.id, base.dir)
    assert present.value.code == "update_staged"
    with pytest.raises(Conflict, match="is staged for"):
        base_updates.apply(base.platform, base.id, digest=base.old.digest)
    assert base.platform.models.get(base.id).digest == base.old.digest
    assert base_updates.abandon(base.platform, base.id) is None
    assert new.is_dir(), "files that the operator named by their path stay"
    assert base_updates.abandon(base.platform, base.id) is None
    assert [h["what"] for h in base.entry()["history"]] == ["staged", "abandoned"]
    with pytest.raises(Conflict) as nothing:
        base_updates.apply(base.platform, base.id)
    assert nothing.value.code == "nothing_staged"
    with pytest.raises(NotFound):
        base_updates.abandon(base.platform, "acme/nobody")


def test_staged_bytes_that_were_changed_are_not_switched_to(base: Base, new: Path) -> None:
    base_updates.stage_local(base.platform, base.id, new)
    (new / "model.safetensors").write_bytes((base.dir / "model.safetensors").read_bytes())
    with pytest.raises(IntegrityError):
        base_updates.apply(base.platform, base.id)
    assert base.platform.models.get(base.id).digest == base.old.digest


def test_jobs_under_way_keep_the_bytes_that_they_were_promised(base: Base, new: Path, training_file: str) -> None:
    platform = base.platform
    request = JobRequest.from_body({"model": base.id, "training_file": training_file})
    before = str(jobs.submit(platform, base.tenant.id, request).job.id)
    base_updates.stage_local(platform, base.id, new)
    base_updates.apply(platform, base.id)
    after = str(jobs.submit(platform, base.tenant.id, request).job.id)
    with platform.engine.connect() as conn:
        query = sa.select(jobs_table.c.id, jobs_table.c.base_digest).where(jobs_table.c.id.in_([before, after]))
        digests = {row.id: row.base_digest for row in conn.execute(query)}
    assert digests[before] == base.old.digest
    model, directory = platform.models.get_local(base.id, digests[before], fresh=True)
    assert (model.digest, directory) == (base.old.digest, base.dir)
    assert platform.models.get_local(base.id, digests[after])[1] == new
    later = replace(platform, clock=lambda: platform.clock() + timedelta(days=1))
    assert base_updates.prune(later, base.id) == []
    jobs.cancel(platform, base.tenant.id, before)
    assert base_updates.prune(platform, base.id) == [], "a submission may be on its way that was promised them"
    assert base_updates.prune(later, base.id) == [base.old.digest]
    assert base.dir.is_dir()
    with pytest.raises(IntegrityError):
        platform.models.get_local(base.id, base.old.digest)


def test_going_back_to_replaced_bytes_needs_no_verdict_of_what_was_trained_on_them(base: Base, new: Path) -> None:
    platform = base.platform
    base_updates.stage_local(platform, base.id, new)
    base_updates.apply(platform, base.id)
    base.adapter()
    assert [a.state for a in base_updates.status(platform, base.id).adapters] == ["not evaluated"]
    back = base_updates.stage_local(platform, base.id, base.dir)
    assert [a.state for a in back.adapters] == ["accepted"]
    done = base_updates.apply(platform, base.id)
    assert (done.digest, len(done.previous)) == (base.old.digest, 1)


def test_fetched_bytes_are_deleted_when_they_are_dropped(base: Base, new: Path) -> None:
    with running_model_hub() as hub:
        hub.repos["acme/new"] = {p.name: p.read_bytes() for p in new.iterdir()}
        platform = replace(base.platform, settings=replace(base.platform.settings, hub_endpoint=hub.endpoint))
        staged = base_updates.stage_from_hub(platform, base.id, repo="acme/new", revision=SHA)
    assert staged.staged is not None
    fetched = platform.models.get_pinned(base.id, staged.staged).directory
    assert fetched is not None
    assert base_updates.abandon(platform, base.id) == fetched
    assert not fetched.exists()


@pytest.mark.parametrize("killed_after", [1, 2])
def test_a_kill_between_two_steps_leaves_what_the_next_call_goes_on_from(base: Base, new: Path, killed_after: int) -> None:
    """What a kill leaves is the operator's file of some step and the rows of the database, and nothing else is read."""
    adapter = base.adapter()
    staged = base_updates.stage_local(base.platform, base.id, new)
    if killed_after == 2:
        base_updates.evaluate(base.platform, base.id)
    again = replace(base.platform, models=catalogue.catalogue_of(base.platform.settings))
    assert base_updates.stage_local(again, base.id, new).staged == staged.staged
    (standing,) = base_updates.evaluate(again, base.id).adapters
    assert standing.adapter_id == adapter
    base.judge(standing.evaluation_id)
    assert base_updates.apply(again, base.id).digest == staged.staged
    assert len(base.entry()["history"]) == 2


def test_the_local_server_starts_with_the_bytes_that_the_id_stands_for(base: Base, new: Path) -> None:
    settings = base.platform.settings
    with edited(catalogue_file(settings.models_dir)) as entries:
        entries[DEMO_MODEL] = {**entries[base.id], "id": DEMO_MODEL}
    assert demo_model_dir(settings) == base.dir
    base_updates.stage_local(base.platform, DEMO_MODEL, new)
    assert demo_model_dir(settings) == base.dir
    base_updates.apply(base.platform, DEMO_MODEL)
    assert demo_model_dir(settings) == new
