"""Adapters from registration to an answer: a real database, a real object store, a real inference server."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.datasets.tables import files
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Actor, Platform
from control_plane.serving import node_files
from control_plane.serving.rollout import reconcile
from control_plane.serving.tables import deployments
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.errors import Conflict, IntegrityError, LineageIncomplete, NotFound
from engine.adapters.package import ADAPTER_WEIGHTS
from engine.adapters.stages import Stage
from engine.evals.gate.verdict import Finding, Verdict
from engine.evals.scoring.report import EvalReport
from resources.inference.fleet_client import HttpFleet
from tests.support.jobs.finished_job import put_checkpoint
from tests.support.jobs.registered_adapter import add_dataset
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server

LOCK = "1" * 64
PASSED = Verdict(outcome="passed", findings=())
FAILED = Verdict(outcome="quarantined", findings=(Finding(rule="task", code="task_not_better", passed=False, blocking=True, detail=""),))
REPORT = EvalReport(
    base_model="tiny", base_digest="b", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
    literal=True, scores=(), golden_faults=(), samples=(), seconds=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[str]:
    with inference_server(base, port=free_port()) as url:
        yield url


@contextmanager
def fleet(url: str) -> Iterator[HttpFleet]:
    made = HttpFleet([url], token=TOKEN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unserved(new_platform: Callable[..., Platform], base: Path) -> Iterator[Platform]:
    """A platform whose fleet is not there (nobody listens on port 9)."""
    models = Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    with fleet("http://127.0.0.1:9") as nobody:
        yield replace(new_platform(drain_s="0"), models=models, fleet=nobody)


@pytest.fixture(scope="module")
def served(unserved: Platform, server: str) -> Iterator[Platform]:
    with fleet(server) as running:
        yield replace(unserved, fleet=running)


class Told(HttpFleet):
    """A fleet that writes down what it is told, in its order."""

    def __init__(self, url: str) -> None:
        super().__init__([url], token=TOKEN)
        self.calls: list[tuple[str, str]] = []

    def load(self, url: str, name: str, directory: Path) -> None:
        self.calls.append(("load", name))
        super().load(url, name, directory)

    def unload(self, url: str, name: str) -> None:
        self.calls.append(("unload", name))
        super().unload(url, name)

    def probe(self, url: str, name: str) -> float:
        self.calls.append(("probe", name))
        return super().probe(url, name)


@dataclass(frozen=True, kw_only=True)
class Customer:
    """A tenant of its own for one test, with what its jobs left."""

    platform: Platform
    id: str
    base: Path
    scratch: Path

    def job(self, *, suffix: str | None = "support", **changes: object) -> str:
        job_id, file_id, now = f"ftjob-{uuid.uuid4().hex[:12]}", f"file-{uuid.uuid4().hex[:12]}", datetime.now(UTC)
        digest = self.platform.models.get("tiny").digest
        file = {"id": file_id, "tenant_id": self.id, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "x"}
        job = {
            "id": job_id, "tenant_id": self.id, "state": "evaluating", "tier": "standard", "model": "tiny", "base_digest": digest,
            "method": "sft", "training_file": file_id, "suffix": suffix, "seed": 0, "request": {}, "request_sha256": "r",
            "hyperparameters": {}, "dataset_id": "ds_1", "pack_fingerprint": "p", "spec": {"lock_sha256": LOCK, "commit": "c"},
            "spec_sha256": "5" * 64, "created_at": now,
        }  # fmt: skip
        with self.platform.engine.begin() as conn:
            conn.execute(sa.insert(files).values(**file, object_key="k", status="processed", created_at=now))
            add_dataset(conn, self.id, "ds_1", now=now)
            conn.execute(sa.insert(jobs).values(**{**job, **changes}))
        return job_id

    def adapter(
        self, *, verdict: Verdict = PASSED, seed: int = 0, job: str | None = None, suffix: str | None = "support", **config: object
    ) -> str:
        """Registers an adapter; returns its id."""
        directory = build_tiny_adapter(self.scratch / uuid.uuid4().hex, self.base, base_name="trained-at", seed=seed, config=config)
        job_id = job or self.job(suffix=suffix)
        made, _ = adapters.register(
            self.platform, tenant=self.id, job_id=job_id, directory=directory, report=REPORT, verdict=verdict, eval_report_key="k"
        )
        return made.id


@pytest.fixture
def customer(served: Platform, base: Path, tmp_path: Path) -> Customer:
    made, _ = tenants.create(served, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return Customer(platform=served, id=made.id, base=base, scratch=tmp_path)


def answer(server: str, model: str) -> str:
    with openai.OpenAI(base_url=f"{server}/v1", api_key=TOKEN, max_retries=0) as client:
        made = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0)
    return made.choices[0].message.content or ""


def stages(customer: Customer) -> dict[str, str]:
    return {a.id: a.stage for a in adapters.list_adapters(customer.platform, customer.id).items}


def test_a_passed_adapter_is_a_draft_with_its_lineage_and_its_files(customer: Customer) -> None:
    job = customer.job(suffix="My Bot")
    id_ = customer.adapter(job=job)
    record = adapters.get_adapter(customer.platform, customer.id, id_)
    assert (record.stage, record.observed, record.job_id) == ("draft", "unloaded", job)
    assert record.name.startswith(f"ft:tiny:{customer.id}:my-bot:")
    assert {k: getattr(record, k) for k in ("dataset_id", "lock_sha256", "commit", "rank")} == {
        "dataset_id": "ds_1", "lock_sha256": LOCK, "commit": "c", "rank": 8,
    }  # fmt: skip
    stored = [o.key.rsplit("/", 1)[1] for o in customer.platform.objects.list(record.object_prefix)]
    assert stored == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]


def test_registering_a_job_twice_gives_one_adapter(customer: Customer) -> None:
    job = customer.job()
    assert customer.adapter(job=job) == customer.adapter(job=job, seed=5)
    assert len(stages(customer)) == 1


def test_an_adapter_with_a_gap_in_its_lineage_is_not_registered(customer: Customer) -> None:
    with pytest.raises(LineageIncomplete, match="without: dataset_id, commit;"):
        customer.adapter(job=customer.job(dataset_id=None, spec={"lock_sha256": LOCK}))
    assert stages(customer) == {}


def test_a_failed_gate_and_an_unservable_adapter_are_quarantined_and_not_promoted(customer: Customer) -> None:
    failed, biased = customer.adapter(verdict=FAILED), customer.adapter(bias="all")
    assert set(stages(customer).values()) == {"quarantined"}
    with pytest.raises(Conflict, match=r"cannot be promoted: gate_failed: its evaluation did not pass") as refused:
        promotions.promote(customer.platform, customer.id, failed)
    assert refused.value.code == "promotion_refused"
    with pytest.raises(Conflict, match="unsupported_feature: bias"):
        promotions.promote(customer.platform, customer.id, biased)


def test_a_dora_adapter_is_registered_for_exports_and_its_promotion_names_the_next_step(customer: Customer) -> None:
    dora = customer.adapter(use_dora=True)
    assert set(stages(customer).values()) == {"draft"}
    with pytest.raises(Conflict, match=r"needs_merge: .*ft export NAME --format merged"):
        promotions.promote(customer.platform, customer.id, dora)


def test_an_adapter_above_the_deployments_rank_is_quarantined(customer: Customer) -> None:
    settings = replace(customer.platform.settings, max_lora_rank=1)
    replace(customer, platform=replace(customer.platform, settings=settings)).adapter()
    assert set(stages(customer).values()) == {"quarantined"}


def test_a_promoted_adapter_answers_as_soon_as_its_promotion_returns(customer: Customer, server: str) -> None:
    id_, told = customer.adapter(seed=1), Told(server)
    theirs = customer.platform.in_scope_of(customer.id, Actor(kind="key", id="key-1"))
    promoted = promotions.promote(replace(theirs, fleet=told), customer.id, id_)
    said = answer(server, promoted.name)
    told.close()
    assert told.calls == [("load", promoted.name), ("probe", promoted.name)], "one load, and one token to be sure"
    assert said != answer(server, "tiny")
    assert (promoted.stage, promoted.desired, promoted.observed, promoted.detail) == ("production", "loaded", "loaded", None)
    again = promotions.promote(theirs, customer.id, promoted.name)
    assert again.promoted_at == promoted.promoted_at


def test_rollback_serves_the_adapter_before_and_withdraws_the_present_one(customer: Customer, server: str) -> None:
    first, second = customer.adapter(seed=1), customer.adapter(seed=2)
    other = customer.adapter(seed=3, suffix="other")
    one, _, two = (promotions.promote(customer.platform, customer.id, id_) for id_ in (first, other, second))
    lineage = one.name.rsplit(":", 1)[0]
    assert promotions.resolve_model(customer.platform, customer.id, lineage).model == two.name
    before, told = answer(server, one.name), Told(server)
    theirs = customer.platform.in_scope_of(customer.id, Actor(kind="key", id="key-1"))
    done = promotions.rollback(replace(theirs, fleet=told), customer.id, second)
    told.close()
    assert told.calls == [], "the earlier one is loaded still"
    assert (done.serving.observed, done.withdrawn.desired) == ("loaded", "unloaded")
    assert answer(server, two.name), "a request that was on its way is answered still"
    assert [(r.action.kind, r.action.name, r.error) for r in reconcile(customer.platform)] == [("unload", two.name, None)]
    assert (done.serving.id, done.withdrawn.id, done.withdrawn.stage) == (first, second, "staging")
    assert answer(server, one.name) == before
    with pytest.raises(openai.NotFoundError):
        answer(server, two.name)
    assert promotions.resolve_model(customer.platform, customer.id, lineage).model == one.name
    assert promotions.rollback(theirs, customer.id, second).serving.id == first
    assert promotions.promote(theirs, customer.id, second).observed == "loaded"
    assert promotions.resolve_model(customer.platform, customer.id, lineage).model == two.name


def test_a_whole_model_is_registered_and_not_promoted_where_no_server_can_be_started_for_it(customer: Customer, base: Path) -> None:
    made = build_tiny_model(customer.scratch / "whole", seed=3)
    asked = {"tenant": customer.id, "report": REPORT, "verdict": PASSED, "eval_report_key": "k"}
    found, refused = adapters.register(customer.platform, job_id=customer.job(), directory=made, **asked)  # type: ignore[arg-type]
    assert (found.type, found.stage, found.rank, found.alpha, found.modules) == ("full_model", Stage.DRAFT, None, None, ())
    assert (found.desired, found.observed, found.detail, refused) == ("unloaded", "unloaded", None, [])
    stored = sorted(o.key.rsplit("/", 1)[-1] for o in customer.platform.objects.list(found.object_prefix))
    assert stored == ["config.json", "manifest.json", "model.safetensors"]
    with pytest.raises(Conflict, match=r"needs_own_server.*ft export NAME --format merged"):
        promotions.promote(customer.platform, customer.id, found.name)
    with pytest.raises(Conflict, match="is draft and not served"):
        promotions.resolve_model(customer.platform, customer.id, found.name)
    assert promotions.deprecate(customer.platform, customer.id, found.id).stage == Stage.DEPRECATED


def test_a_whole_model_that_is_none_of_its_base_is_quarantined(customer: Customer) -> None:
    made = build_tiny_model(customer.scratch / "whole", seed=3)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    asked = {"tenant": customer.id, "report": REPORT, "verdict": PASSED, "eval_report_key": "k"}
    job_id = customer.job()
    found, refused = adapters.register(customer.platform, job_id=job_id, directory=made, **asked)  # type: ignore[arg-type]
    assert (found.stage, found.eval_passed) == (Stage.QUARANTINED, False)
    assert "num_hidden_layers" in refused[0].detail
    again = adapters.register(customer.platform, job_id=job_id, directory=made, **asked)  # type: ignore[arg-type]
    assert (again[0].id, again[1]) == (found.id, refused), "a step that died after the registration finds the same reasons"


def test_rollback_without_an_earlier_adapter_changes_nothing(customer: Customer) -> None:
    only = customer.adapter()
    with pytest.raises(Conflict, match="only a production adapter"):
        promotions.rollback(customer.platform, customer.id, only)
    promotions.promote(customer.platform, customer.id, only)
    with pytest.raises(Conflict, match="no earlier production adapter") as refused:
        promotions.rollback(customer.platform, customer.id, only)
    assert refused.value.code == "no_previous_adapter"
    assert adapters.get_adapter(customer.platform, customer.id, only).observed == "loaded"


def test_an_adapter_names_the_one_that_its_training_started_from(customer: Customer) -> None:
    first = customer.adapter()
    start = {"adapter": "first", "manifest_sha256": "m", "adapter_id": first}
    second = adapters.get_adapter(customer.platform, customer.id, customer.adapter(job=customer.job(warm_start=start)))
    assert (second.parent_adapter_id, second.parent_checkpoint_id) == (first, None)
    assert adapters.get_adapter(customer.platform, customer.id, first).parent_adapter_id is None
    kept = put_checkpoint(customer.platform, customer.id, customer.job(), step=1)
    of_checkpoint = customer.adapter(job=customer.job(warm_start={**start, "adapter_id": None, "checkpoint_id": kept}))
    assert adapters.get_adapter(customer.platform, customer.id, of_checkpoint).parent_checkpoint_id == kept


def test_a_deprecated_adapter_is_no_longer_served_and_can_come_back(customer: Customer, server: str) -> None:
    id_ = customer.adapter()
    name = promotions.promote(customer.platform, customer.id, id_).name
    assert promotions.deprecate(customer.platform, customer.id, id_).stage == "deprecated"
    reconcile(customer.platform)
    assert promotions.deprecate(customer.platform, customer.id, id_).observed == "unloaded"
    with pytest.raises(openai.NotFoundError):
        answer(server, name)
    with pytest.raises(Conflict, match="deprecated and not served"):
        promotions.resolve_model(customer.platform, customer.id, name)
    assert promotions.promote(customer.platform, customer.id, id_).observed == "loaded"


def test_another_tenants_adapter_looks_like_one_that_does_not_exist(customer: Customer) -> None:
    record = promotions.promote(customer.platform, customer.id, customer.adapter())
    stranger, _ = tenants.create(customer.platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    calls: list[Callable[[str], object]] = [
        lambda ref: adapters.get_adapter(customer.platform, stranger.id, ref),
        lambda ref: promotions.promote(customer.platform, stranger.id, ref),
        lambda ref: promotions.rollback(customer.platform, stranger.id, ref),
        lambda ref: promotions.deprecate(customer.platform, stranger.id, ref),
        lambda ref: promotions.resolve_model(customer.platform, stranger.id, ref),
    ]
    for call in calls:
        for reference in (record.id, record.name):
            with pytest.raises(NotFound):
                call(reference)
    with pytest.raises(NotFound):
        promotions.resolve_model(customer.platform, stranger.id, record.name.rsplit(":", 1)[0])
    assert promotions.resolve_model(customer.platform, stranger.id, "tiny").model == "tiny"


def test_a_fleet_that_is_down_delays_serving_and_loses_nothing(customer: Customer, unserved: Platform, server: str) -> None:
    promoted = promotions.promote(unserved, customer.id, customer.adapter(seed=4))
    assert (promoted.stage, promoted.desired, promoted.observed) == ("production", "loaded", "unloaded")
    assert "did not answer" in promoted.detail
    done = reconcile(customer.platform)
    assert [(r.action.kind, r.error) for r in done if r.action.name == promoted.name] == [("load", None)]
    assert answer(server, promoted.name)
    assert reconcile(customer.platform) == []


def test_a_refusal_for_good_is_recorded_and_not_repeated(customer: Customer) -> None:
    record = promotions.promote(replace(customer.platform, fleet=None), customer.id, customer.adapter())
    assert (record.desired, record.observed) == ("loaded", "unloaded")
    directory = customer.platform.settings.work_dir / "adapters" / record.id
    (directory / "notes.txt").write_text("what no server takes")
    (tried,) = reconcile(customer.platform)
    assert tried.error is not None
    assert "odd_files" in tried.error
    failed = adapters.get_adapter(customer.platform, customer.id, record.id)
    assert failed.observed == "failed"
    assert reconcile(customer.platform) == []
    (directory / "notes.txt").unlink()
    assert promotions.promote(customer.platform, customer.id, record.id).observed == "loaded"


def test_a_damaged_copy_on_the_node_is_fetched_again(customer: Customer, server: str) -> None:
    id_ = customer.adapter(seed=8)
    copy = node_files.materialise(customer.platform, adapters.get_adapter(customer.platform, customer.id, id_)) / ADAPTER_WEIGHTS
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    promoted = promotions.promote(customer.platform, customer.id, id_)
    assert (promoted.observed, copy.read_bytes() == whole) == ("loaded", True)
    stat = copy.stat()
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(IntegrityError, match="a server answers with it: deprecate it"):
        promotions.promote(customer.platform, customer.id, id_)
    assert answer(server, promoted.name)


def test_files_that_are_not_the_registered_ones_are_never_served(customer: Customer) -> None:
    id_ = customer.adapter()
    record = adapters.get_adapter(customer.platform, customer.id, id_)
    key = f"{record.object_prefix}/{ADAPTER_WEIGHTS}"
    whole = customer.platform.objects.get_bytes(key)
    customer.platform.objects.put_bytes(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="not the file that was registered"):
        promotions.promote(customer.platform, customer.id, id_)
    assert stages(customer) == {id_: Stage.DRAFT}


def test_a_base_that_has_changed_since_training_blocks_promotion(customer: Customer) -> None:
    id_ = customer.adapter(job=customer.job(base_digest="0" * 64))
    with pytest.raises(Conflict, match="base_digest_mismatch: trained on tiny 0000"):
        promotions.promote(customer.platform, customer.id, id_)


def test_adapters_are_listed_in_pages_newest_first(customer: Customer) -> None:
    made = [customer.adapter() for _ in range(3)]
    first = adapters.list_adapters(customer.platform, customer.id, limit=2)
    assert [a.id for a in first.items] == made[:0:-1]
    assert first.has_more
    rest = adapters.list_adapters(customer.platform, customer.id, limit=2, after=made[1])
    assert ([a.id for a in rest.items], rest.has_more) == ([made[0]], False)
    assert adapters.list_adapters(customer.platform, customer.id, stage="production").items == []


def test_a_server_that_lost_everything_is_given_everything_again(
    customer: Customer, server: str, new_platform: Callable[..., Platform]
) -> None:
    """Another process takes the server's place, and the node-local files are lost too."""
    own = replace(new_platform(), models=customer.platform.models, fleet=customer.platform.fleet)
    tenant, _ = tenants.create(own, "acme", tier="standard")
    mine = replace(customer, platform=own, id=tenant.id)
    name = promotions.promote(own, tenant.id, mine.adapter(seed=6)).name
    withdrawn = promotions.promote(own, tenant.id, mine.adapter(seed=7, suffix="b"))
    before = answer(server, name)
    promotions.deprecate(own, tenant.id, withdrawn.id)
    shutil.rmtree(own.settings.work_dir / "adapters")
    with inference_server(customer.base, port=free_port()) as url, fleet(url) as fresh:
        restarted = replace(own, fleet=fresh)
        assert [(r.action.kind, r.action.name) for r in reconcile(restarted)] == [("load", name)]
        assert answer(url, name) == before
        assert reconcile(restarted) == []
    with own.engine.connect() as conn:
        rows = conn.execute(sa.select(deployments.c.name, deployments.c.desired, deployments.c.observed)).all()
    assert {tuple(row) for row in rows} == {(name, "loaded", "loaded"), (withdrawn.name, "unloaded", "unloaded")}
