"""``ft admin nodes`` and ``ft admin kueue``: on a platform with two pools of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from control_plane.capacity import kueue, nodes
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from control_plane.tenants import service as tenants
from tests.support.jobs.queued_jobs import queued

POOLS = """
pools:
  - {name: small, gpu_type: h100-80gb, takes: [lora], nodes: [{count: 2, gpus: 8}]}
  - {name: wide, gpu_type: h100-80gb, takes: [full, large], reserved_gpus: 32, nodes: [{count: 4, gpus: 8, fabric: ib}]}
"""


def test_the_clusters_queues_are_written_and_a_drained_node_makes_them_differ(
    offline: Callable[..., Any], new_platform: Callable[..., Platform], tmp_path: Path
) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS)
    platform = new_platform(pools=str(tmp_path / "pools.yaml"))
    tenants.create(platform, "acme", tier="premium")
    env = {"FT_DATABASE_URL": platform.settings.database_url, "FT_POOLS": str(tmp_path / "pools.yaml")}
    files = offline("admin", "kueue", "--out", str(tmp_path / "out"), "--json", **env).json["files"]
    assert files == [str(tmp_path / "out" / name) for name in ("queues.yaml", "tenants.yaml", "nodes.sh")]
    written = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    assert sorted(written) == ["nodes.sh", "queues.yaml", "tenants.yaml"]
    assert {p.stat().st_mode & 0o077 for p in (tmp_path / "out").iterdir()} == {0}, "they name tenants"
    assert "kubectl label --overwrite node wide-3 ft-platform/pool=wide" in written["nodes.sh"]
    assert "namespace: t-acme" in written["tenants.yaml"]
    queues = [q for q in yaml.safe_load_all(written["queues.yaml"]) if q["kind"] == "ClusterQueue"]
    whole = [one for name in ("queues.yaml", "tenants.yaml") for one in yaml.safe_load_all(written[name])]
    assert [*yaml.safe_load_all(offline("admin", "kueue", **env).out)] == whole
    assert offline("admin", "kueue", "--json", **env).json == {"apiVersion": "v1", "kind": "List", "items": whole}
    live = yaml.safe_dump({"kind": "List", "items": queues})
    assert kueue.check(platform, live) == []

    drained = offline("admin", "nodes", "drain", "wide-0", "--reason", "new fans", "--json", **env).json
    assert (drained["state"], drained["reason"], drained["used_gpus"]) == ("drained", "new fans", 0)
    shown = offline("admin", "nodes", "list", **env).out
    assert "wide-0" in shown and "new fans" in shown and "8 x h100-80gb" in shown
    differs = offline("admin", "kueue", "--check", "-", stdin=live, **env)
    assert differs.code == 1 and "add up to 32 GPUs and pool wide has 24 ready" in differs.out
    as_json = offline("admin", "kueue", "--check", "-", "--json", stdin=live, **env)
    assert (as_json.code, as_json.json) == (1, {"agrees": False, "differences": differs.out.splitlines()})


def test_while_a_node_drains_the_quota_keeps_what_its_jobs_hold(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS)
    world = queued(new_platform(pools=str(tmp_path / "pools.yaml")), write_chat_rows)
    before = kueue.files(world.platform)["queues.yaml"]
    job = world.job(world.tenant(), gpus=6)
    world.round()
    nodes.drain(world.platform, "small-0", reason="new fans", by="ops")
    (told,) = kueue.check(world.platform, before)
    assert "add up to 16 GPUs and pool small has 8 ready and 6 that jobs hold on drained nodes" in told
    assert kueue.check(world.platform, kueue.files(world.platform)["queues.yaml"]) == []
    cycle.release(world.platform, job, 1)
    (told,) = kueue.check(world.platform, before)
    assert "pool small has 8 ready; apply" in told
