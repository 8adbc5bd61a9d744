"""Evaluations of a base that no single GPU holds: they get as many GPUs of one node as it needs, and all of them are counted and billed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.billing import prices as price_lists
from control_plane.billing.tables import meter_events
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import expected_time
from control_plane.jobs.estimates import service as estimates
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from control_plane.quotas.tables import quota_holds
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import InvalidRequest, NotFound
from core.workload import Kind
from tests.support.jobs.evaluated_jobs import evaluating_job
from tests.support.jobs.followed_evaluations import Following, following
from tests.support.jobs.followed_jobs import Scripted
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.scripted_evaluation import GO

NAMES = [str(number) for number in range(20, 28)]
"""CUDA names of this machine's pretended GPUs: four for each node of the pool."""
LLAMA_70B = {
    "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
POOLS = """
pools:
  - name: nodes
    gpu_type: {gpu_type}
    nodes:
      - {{count: {count}, gpus: {gpus}, fabric: ib}}
"""


@pytest.fixture
def large_base(tmp_path: Path) -> Catalogue:
    """A base whose config has the shape of a 70B model. Its weights are the tiny model's: only a training or an evaluation reads them."""
    directory = build_tiny_model(tmp_path / "large-base")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **LLAMA_70B}))
    return Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(directory), "license": "Apache-2.0"}, directory)})


@pytest.fixture
def on_pool(fresh_platform: Platform, large_base: Catalogue, tmp_path: Path) -> Callable[..., Platform]:
    """Makes the platform with one pool of this many nodes of this many GPUs each."""

    def make(count: int, gpus: int, gpu_type: str) -> Platform:
        file = tmp_path / f"pools-{count}x{gpus}-{gpu_type}.yaml"
        file.write_text(POOLS.format(count=count, gpus=gpus, gpu_type=gpu_type))
        return replace(fresh_platform, models=large_base, settings=replace(fresh_platform.settings, pools_file=file))

    return make


@pytest.fixture
def platform(on_pool: Callable[..., Platform]) -> Platform:
    return on_pool(2, 4, "h100-80gb")


@pytest.fixture
def followed(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(NAMES))
    with following(platform, Scripted(platform.settings.work_dir / "launcher")) as made:
        yield made


@pytest.mark.slow
def test_an_evaluation_that_two_gpus_hold_gets_both_on_one_node_and_both_are_billed(
    followed: Following, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    platform, job_id = followed.platform, evaluating_job(followed.platform, tenant.id, write_chat_rows())
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()
        held_s = conn.execute(sa.select(quota_holds.c.gpu_seconds).where(quota_holds.c.job_id == job_id)).scalar_one()
    assert job.evaluation_gpus == 2 < job.num_gpus
    assert held_s == pytest.approx(2 * job.evaluation_s), "it is trained"

    job_dir = platform.settings.job_dir(job_id)
    job_dir.mkdir(parents=True, exist_ok=True)
    (job_dir / GO).write_text("")
    followed.evaluate(tenant.id, job_id)
    with platform.engine.connect() as conn:
        held = conn.execute(sa.select(reservations).where(reservations.c.kind == Kind.EVALUATE)).one()
        started, ended = conn.execute(sa.select(meter_events).order_by(meter_events.c.at)).all()
    assert (held.num_gpus, len(held.placement), len(held.devices[0])) == (2, 1, 2)
    assert (job_dir / "visible_devices").read_text() == ",".join(NAMES[number] for number in held.devices[0])
    assert (started.data["num_gpus"], started.data["gpu_type"]) == (2, "h100-80gb")
    assert ended.at > started.at


APART = """
pools:
  - {name: training, gpu_type: h100-80gb, takes: [lora, large, full], nodes: [{count: 2, gpus: 4, fabric: ib}]}
  - {name: judging, gpu_type: h200-141gb, takes: [evaluation], nodes: [{count: 1, gpus: 2}]}
"""


def test_an_estimate_prices_the_evaluation_in_the_pool_that_takes_evaluations(
    platform: Platform, tenant: Tenant, training_file: str, tmp_path: Path
) -> None:
    (tmp_path / "apart.yaml").write_text(APART)
    apart = replace(platform, settings=replace(platform.settings, pools_file=tmp_path / "apart.yaml"))
    found = estimates.estimate(apart, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": training_file}))
    prices = price_lists.load(apart.settings.prices_file).at(apart.clock())
    evaluation_s = expected_time.evaluation_s(apart.models.get("tiny-base"), 1)
    assert found.seconds_to_finish is not None and found.seconds_to_start is not None
    training_s = found.seconds_to_finish - found.seconds_to_start - evaluation_s
    seconds = {"h100-80gb": found.num_gpus * training_s, "h200-141gb": evaluation_s}
    micros = {name: prices.gpu(name).per_hour("on_demand") * held / 3600 for name, held in seconds.items()}
    assert found.price_micros == pytest.approx(sum(micros.values()) * prices.tiers[found.tier].gpu_percent / 100, rel=1e-3)
    assert found.gpu_type == "h100-80gb"
    (said,) = [line for line in found.assumptions if line.startswith("price: 4 USD per GPU-hour of h100-80gb (on demand)")]
    assert said.endswith(f"; 5 USD per GPU-hour of h200-141gb (on demand) for {evaluation_s:.0f} s of evaluation on one GPU")


def test_an_estimate_counts_all_gpus_of_the_evaluation(
    platform: Platform, on_pool: Callable[..., Platform], tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    job = jobs.get(platform, tenant.id, evaluating_job(platform, tenant.id, write_chat_rows())).job
    request = JobRequest.from_body({"model": "tiny-base", "training_file": job.training_file})
    evaluation_s = expected_time.evaluation_s(platform.models.get("tiny-base"), 1)
    for of, num_gpus, says in (
        (platform, 2, "s of evaluation on 2 GPUs"),
        (on_pool(2, 4, "h200-141gb"), 1, "s of evaluation on one GPU"),
    ):
        found = estimates.estimate(of, tenant.id, request)
        assert found.seconds_to_finish is not None and found.seconds_to_start is not None
        assert found.estimated_finish is not None and found.estimated_start is not None
        span_s = found.seconds_to_finish - found.seconds_to_start
        assert found.estimated_finish - found.estimated_start == pytest.approx(span_s, abs=1.5), "both with the evaluation"
        training_s = found.seconds_to_finish - found.seconds_to_start - evaluation_s
        gpu_s = found.num_gpus * training_s + num_gpus * evaluation_s
        assert found.gpu_hours * 3600 == pytest.approx(gpu_s, abs=found.num_gpus * 0.2)
        assert any(line.endswith(says) for line in found.assumptions), found.assumptions


def test_a_base_that_fits_on_no_node_is_refused_at_submission(on_pool: Callable[..., Platform], tenant: Tenant) -> None:
    request = JobRequest.from_body({"model": "tiny-base", "training_file": "file-unknown", "adapter": "qlora"})
    says = r"in bf16 \(131 GiB\) on GPUs of one node and needs 2 x h100-80gb, but a job of tier standard gets at most 1 on a node; choose"
    with pytest.raises(InvalidRequest, match=says) as refused:
        jobs.submit(on_pool(8, 1, "h100-80gb"), tenant.id, request)
    assert (refused.value.code, refused.value.param) == ("memory_exceeded", "model")
    with pytest.raises(NotFound, match="file-unknown"):
        jobs.submit(on_pool(8, 1, "h200-141gb"), tenant.id, request)


def test_replicas_multiply_the_gpus_and_divide_the_time(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    job_id = evaluating_job(platform, tenant.id, write_chat_rows(), eval_config={"replicas": 2})
    model = platform.models.get("tiny-base")
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()
        held_s = conn.execute(sa.select(quota_holds.c.gpu_seconds).where(quota_holds.c.job_id == job_id)).scalar_one()
    assert job.evaluation_gpus == 4, "two copies of two GPUs each"
    assert job.evaluation_s == pytest.approx(expected_time.evaluation_s(model, 2))
    assert held_s == pytest.approx(4 * job.evaluation_s)
    setup_s = 2 * expected_time.evaluation_s(model, 2) - expected_time.evaluation_s(model, 1)
    assert setup_s == pytest.approx(expected_time.SETUP_S), "loading the model is not divided"
    found = estimates.estimate(platform, tenant.id, JobRequest.from_body(jobs.get(platform, tenant.id, job_id).job.request))
    assert any(line.endswith("s of evaluation on 4 GPUs") for line in found.assumptions), found.assumptions
    too_many = JobRequest.from_body({"model": "tiny-base", "training_file": "file-unknown", "eval_config": {"replicas": 3}})
    says = r"replicas 3 needs 6 x h100-80gb of one node \(2 for each copy of tiny-base\), but .* at most 4 on a node; set it to 2 at most"
    with pytest.raises(InvalidRequest, match=says) as refused:
        jobs.submit(platform, tenant.id, too_many)
    assert (refused.value.code, refused.value.param) == ("invalid_eval_config", "eval_config.replicas")
