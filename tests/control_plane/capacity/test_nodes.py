"""Nodes are drained and taken back; several pools on one machine; what no pool could hold is refused at submission."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.capacity import configured_pools, kueue, nodes
from control_plane.composition import open_platform
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import model_limits
from control_plane.jobs.estimates.service import estimate
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.tables import audit_log
from core.errors import Conflict, InvalidRequest, NotFound, Unavailable

TWO_NODES = """
pools:
  - name: desk
    gpu_type: local
    takes: [lora]
    reserved_gpus: 1
    nodes: [{count: 2, gpus: 2, prefix: desk}]
"""


@pytest.fixture(scope="module")
def desk(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform with two nodes of two slots, one of the four kept for premium jobs, and adapters alone."""
    file = tmp_path_factory.mktemp("pools") / "pools.yaml"
    file.write_text(TWO_NODES)
    return new_platform(pools=str(file))


@pytest.fixture
def submit(desk: Platform, write_chat_rows: Callable[..., Path]) -> Callable[..., Any]:
    owners = {tier: tenants.create(desk, f"t-{uuid.uuid4().hex[:10]}", tier=tier)[0].id for tier in ("standard", "premium")}
    uploaded = {}
    for tier, owner in owners.items():
        with write_chat_rows().open("rb") as rows:
            uploaded[tier] = uploaded_files.create(desk, owner, rows, filename="rows.jsonl", purpose="fine-tune").id

    def send(tier: str, use: Callable[..., Any] = jobs.submit, **asked: Any) -> Any:
        body = {"model": "tiny-base", "training_file": uploaded[tier], "hyperparameters": {"batch_size": 8}, **asked}
        return use(desk, owners[tier], JobRequest.from_body(body))

    return send


def test_a_node_is_drained_and_taken_back(desk: Platform) -> None:
    assert [(n.name, n.state) for n in nodes.list_nodes(desk)] == [("desk-0", "ready"), ("desk-1", "ready")]
    done = nodes.drain(desk, "desk-1", reason="a fan is loud", by="cli:ops")
    assert (done.state, done.reason, done.drained_by) == ("drained", "a fan is loud", "cli:ops")
    (pool,) = configured_pools.pools(desk)
    assert [(n.name, n.ready) for n in pool.nodes] == [("desk-0", True), ("desk-1", False)]
    assert (pool.num_gpus, configured_pools.planned(desk)[0].num_gpus) == (2, 4)
    assert nodes.drain(desk, "desk-1", reason="the fan is new", by="cli:other").drained_by == "cli:ops"
    assert nodes.undrain(desk, "desk-1").state == nodes.undrain(desk, "desk-1").state == "ready"
    assert configured_pools.pools(desk)[0].num_gpus == 4
    with desk.engine.connect() as conn:
        of_node = sa.select(audit_log.c.action).where(audit_log.c.object_id == "desk-1").order_by(audit_log.c.seq)
        assert list(conn.execute(of_node).scalars()) == ["node_drain.created", "node_drain.updated", "node_drain.deleted"]


def test_a_node_that_is_not_there_is_not_drained(desk: Platform) -> None:
    for change in (lambda: nodes.drain(desk, "desk-9", reason="x", by="x"), lambda: nodes.undrain(desk, "desk-9")):
        with pytest.raises(NotFound, match="no pool has a node 'desk-9'") as refused:
            change()
        assert refused.value.code == "node_not_found"
    with pytest.raises(InvalidRequest, match="reason has 0 characters"):
        nodes.drain(desk, "desk-0", reason="", by="x")


@pytest.mark.parametrize("use", [jobs.submit, jobs.check, estimate])
def test_a_gang_wider_than_what_is_left_of_the_pool_is_refused_at_submission(submit: Callable[..., Any], use: Callable[..., Any]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"exceeds the 3 that pool desk gives to a job of tier standard .1 of its 4 are kept"
    ) as refused:
        submit("standard", use, hardware={"num_gpus": 4})
    assert (refused.value.code, refused.value.param) == ("invalid_hardware", "hardware.num_gpus")
    if use is not estimate:  # which reads the tokenizer that this model has not
        submit("standard", use, hardware={"num_gpus": 2})
        submit("premium", use, hardware={"num_gpus": 4})


@pytest.mark.parametrize("use", [jobs.submit, jobs.check, estimate])
def test_a_class_that_no_pool_takes_is_refused_at_submission(submit: Callable[..., Any], use: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"no pool of this platform takes training of all parameters .* they take adapters") as refused:
        submit("premium", use, adapter="full")
    assert refused.value.code == "no_pool"


def test_a_models_limits_say_what_the_pools_give(desk: Platform) -> None:
    limits = model_limits.model_limits(desk, model="tiny-base")[0].model_dump()
    by_kind = {a["name"]: a for a in limits["adapters"]}
    assert limits["num_gpus"] == [1, 2, 4]
    assert by_kind["lora"]["tiers"] == ["free", "standard", "premium"] and by_kind["lora"]["defaults"]["num_gpus"] == 1
    assert by_kind["full"]["tiers"] == [] and by_kind["full"]["defaults"]["refused"]["code"] == "no_pool"


def test_a_pool_kept_whole_for_premium_takes_no_other_tier(new_platform: Callable[..., Platform], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(TWO_NODES.replace("reserved_gpus: 1", "reserved_gpus: 4"))
    platform = new_platform(pools=str(tmp_path / "p.yaml"))
    limits = model_limits.model_limits(platform, model="tiny-base")[0].model_dump()
    assert {a["name"]: a["tiers"] for a in limits["adapters"]} == {"lora": ["premium"], "qlora": ["premium"], "full": []}


def test_what_is_no_list_of_queues_is_refused(desk: Platform, new_platform: Callable[..., Platform], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(TWO_NODES.replace("local", "h100-80gb"))
    with pytest.raises(InvalidRequest, match="these are not ClusterQueues"):
        kueue.check(new_platform(pools=str(tmp_path / "p.yaml")), "items: 5")
    with pytest.raises(Conflict, match="all are slots of this machine") as refused:
        kueue.files(desk)
    assert refused.value.code == "no_cluster"


def test_a_pool_that_left_the_file_is_told_and_not_guessed(desk: Platform) -> None:
    assert configured_pools.named(desk, "desk").gpu_type == "local"
    with pytest.raises(Unavailable, match="put it back and drain its nodes"):
        configured_pools.named(desk, "gone")


def test_a_wrong_file_stops_the_platform_before_it_is_open(desk: Platform, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(TWO_NODES.replace("gpu_type: local", "gpu_type: l4-24gb"))
    with pytest.raises(InvalidRequest, match="gpu_type is 'l4-24gb'; use one of h100-80gb, h200-141gb, local") as refused:
        open_platform(replace(desk.settings, pools_file=tmp_path / "wrong.yaml"))
    assert refused.value.code == "invalid_pools"
    with pytest.raises(InvalidRequest, match="FT_LOCAL_GPUS is 0"):
        open_platform(replace(desk.settings, pools_file=None, local_gpus=0))
