"""Kueue's objects: valid against the published definitions, with quotas that are the ready GPUs, and nothing that preempts."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.capacity import configured_pools, kueue
from control_plane.capacity.kueue import Manifest
from engine.scheduler.pools import Node, Pool, equal_nodes, local_pool

SCHEMAS = Path(__file__).parents[3].parent / "shared" / "schemas"
SHIPPED = list(configured_pools.load(Path(__file__).parents[3] / "deploy" / "pools.yaml", gpu_types=("h100-80gb",)))
SPOT = Pool(
    name="cheap",
    nodes=equal_nodes(16, prefix="c"),
    gpu_type="h100-80gb",
    max_gpus_per_job=8,
    pricing="spot",
    cpu_per_gpu=6,
    memory_gib_per_gpu=40,
)
EVERY = [*SHIPPED, SPOT]
OBJECTS = [*kueue.render(EVERY), *kueue.render_tenant("acme", "premium", EVERY), *kueue.render_tenant("bolt", "free", EVERY)]


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server does for an object that is applied strictly."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: closed(v) for k, v in schema.items()}
    return found | {"additionalProperties": False} if "properties" in found and "additionalProperties" not in found else found


@cache
def definition(kind: str) -> Any:
    plural = {"Topology": "topologies", "WorkloadPriorityClass": "workloadpriorityclasses"}.get(kind, f"{kind.lower()}s")
    file = SCHEMAS / f"kueue.x-k8s.io_{plural}.yaml"
    if not file.is_file():
        pytest.skip(f"no definition of {kind} at {file}")
    (version,) = [v for v in yaml.safe_load(file.read_text())["spec"]["versions"] if v["name"] == "v1beta2"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def of_kind(kind: str) -> list[Manifest]:
    return [o for o in OBJECTS if o["kind"] == kind]


@pytest.mark.parametrize("made", OBJECTS, ids=lambda o: f"{o['kind']}-{o['metadata'].get('namespace', '')}-{o['metadata']['name']}")
def test_every_object_holds_to_its_definition(made: Manifest) -> None:
    if made["kind"] == "Namespace":
        pytest.importorskip("kubernetes_validate").validate(made, "1.34", strict=True)
        return
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(made, definition(made["kind"]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made | {"a_field_of_nobody": 1}, definition(made["kind"]))
    assert len(made["metadata"]["name"]) <= 63


def test_a_limit_needs_a_cohort_and_lends_no_more_than_is_owned() -> None:
    """Rules that the definitions write in CEL, which a schema's validator does not read."""
    for queue in of_kind("ClusterQueue"):
        (group,) = queue["spec"]["resourceGroups"]
        assert queue["spec"]["cohortName"] in {c["metadata"]["name"] for c in of_kind("Cohort")}
        assert [r["name"] for r in group["flavors"][0]["resources"]] == group["coveredResources"]
        assert all(r.get("lendingLimit", "0") == "0" for f in group["flavors"] for r in f["resources"])


def test_the_quotas_of_a_pool_add_up_to_its_ready_gpus() -> None:
    assert kueue.differences(OBJECTS, EVERY) == []
    sums: Counter[str] = Counter()
    for queue in of_kind("ClusterQueue"):
        (flavor,) = queue["spec"]["resourceGroups"][0]["flavors"]
        quotas = {r["name"]: r["nominalQuota"] for r in flavor["resources"]}
        gpus = int(quotas["nvidia.com/gpu"])
        cpu, memory = (6, 40) if flavor["name"] == "h100-80gb-cheap" else (12, 112)
        assert (quotas["cpu"], quotas["memory"]) == (str(cpu * gpus), f"{memory * gpus}Gi")
        sums[queue["spec"]["cohortName"]] += gpus
    assert sums == {p.name: p.num_gpus for p in EVERY} and sum(sums.values()) == 325 + 16


def test_what_is_reserved_is_premiums_and_is_lent_to_nobody() -> None:
    small, large, fabric = SHIPPED
    assert kueue.nominal(large) == {"free": 0, "standard": 24, "premium": 24}
    assert kueue.nominal(small) == {"free": 0, "standard": 53, "premium": 0}
    assert kueue.nominal(fabric) == {"premium": 224}
    for queue in of_kind("ClusterQueue"):
        resources = queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
        lent = {r.get("lendingLimit") for r in resources}
        assert lent == ({"0"} if queue["metadata"]["name"].startswith("premium-") else {None})


def test_a_drained_node_takes_its_gpus_out_of_the_quota_and_the_check_sees_it() -> None:
    small, large, fabric = SHIPPED
    drained = replace(large, nodes=(replace(large.nodes[0], ready=False), *large.nodes[1:]))
    assert kueue.nominal(drained) == {"free": 0, "standard": 16, "premium": 24}
    (told,) = kueue.differences(OBJECTS, [small, drained, fabric, SPOT])
    assert told.startswith("flavor h100-80gb-large: the queues' nominal quotas add up to 48 GPUs and pool large has 40 ready")
    gone = replace(large, nodes=tuple(replace(n, ready=False) for n in large.nodes))
    assert kueue.nominal(gone) == {"free": 0, "standard": 0, "premium": 0}


def test_what_jobs_hold_on_a_drained_node_stays_in_the_quota_until_they_end() -> None:
    """Their pods count against it: without, eight of eight would be used, and what is released to the free node waited for them."""
    two = Pool(name="two", nodes=equal_nodes(16, prefix="t"), gpu_type="h100-80gb", max_gpus_per_job=8)
    drained = replace(two, nodes=(replace(two.nodes[0], ready=False), two.nodes[1]))
    assert sum(kueue.nominal(drained, {"t-0": 8}).values()) == 16
    assert sum(kueue.nominal(drained, {"t-0": 3, "t-1": 8}).values()) == 11, "what runs on ready nodes is in the quota already"
    assert sum(kueue.nominal(drained).values()) == 8
    assert kueue.differences(kueue.render([drained], {"t-0": 3}), [drained], {"t-0": 3}) == []
    (told,) = kueue.differences(kueue.render([two]), [drained], {"t-0": 3})
    assert "add up to 16 GPUs and pool two has 8 ready and 3 that jobs hold on drained nodes; apply" in told
    (over,) = kueue.differences(kueue.render([drained], {"t-0": 3}), [drained])
    assert "add up to 11 GPUs and pool two has 8 ready; apply" in over


def test_kueue_preempts_nothing_and_a_cluster_where_it_does_is_told_of() -> None:
    for queue in of_kind("ClusterQueue"):
        assert queue["spec"]["preemption"] == {
            "withinClusterQueue": "Never", "reclaimWithinCohort": "Never", "borrowWithinCohort": {"policy": "Never"},
        }  # fmt: skip
    changed = deepcopy(of_kind("ClusterQueue"))
    changed[0]["spec"]["preemption"]["reclaimWithinCohort"] = "Any"
    (told,) = kueue.differences(changed, EVERY)
    assert "preemption.reclaimWithinCohort is Any: Kueue would kill workloads on its own" in told


def test_a_quota_without_a_pool_is_told_of_and_thousands_are_read() -> None:
    (told,) = kueue.differences(OBJECTS, SHIPPED)
    assert told.startswith("flavor h100-80gb-cheap has a quota and no pool")
    big = Pool(name="big", nodes=equal_nodes(2000, prefix="b"), gpu_type="h100-80gb", max_gpus_per_job=8)
    made = kueue.render([big])
    for queue in made:
        if queue["kind"] == "ClusterQueue" and queue["metadata"]["name"] == "standard-big":
            queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][2]["nominalQuota"] = "2k"  # as the API server gives it back
    assert kueue.differences(made, [big]) == []


def test_a_tenant_has_a_way_into_the_queues_of_its_tier_and_of_lower_ones() -> None:
    mine = {q["metadata"]["name"]: q["spec"]["clusterQueue"] for q in of_kind("LocalQueue") if q["metadata"]["namespace"] == "t-bolt"}
    assert mine == {"free-small": "free-small", "free-large": "free-large", "free-cheap": "free-cheap"}
    queues = {q["metadata"]["name"]: q for q in of_kind("ClusterQueue")}
    spaces = {s["metadata"]["name"]: s["metadata"]["labels"] for s in of_kind("Namespace")}
    for local in of_kind("LocalQueue"):
        into, labels = queues[local["spec"]["clusterQueue"]], spaces[local["metadata"]["namespace"]]
        has_tenant, has_tier = into["spec"]["namespaceSelector"]["matchExpressions"]
        assert has_tenant["key"] in labels and labels[has_tier["key"]] in has_tier["values"]
    assert (
        spaces["t-bolt"]["ft-platform/tier"] not in queues["premium-fabric"]["spec"]["namespaceSelector"]["matchExpressions"][1]["values"]
    )


def test_flavors_and_topologies_find_the_nodes_by_their_labels() -> None:
    labels = dict(kueue.node_labels(EVERY))
    assert len(labels) == sum(len(p.nodes) for p in EVERY)
    topologies = {t["metadata"]["name"]: [level["nodeLabel"] for level in t["spec"]["levels"]] for t in of_kind("Topology")}
    for flavor in of_kind("ResourceFlavor"):
        needed = flavor["spec"]["nodeLabels"]
        found = [of for of in labels.values() if needed.items() <= of.items()]
        pool = next(p for p in EVERY if p.name == needed["ft-platform/pool"])
        assert len(found) == len(pool.nodes)
        assert all(level in of or level == "kubernetes.io/hostname" for of in found for level in topologies[flavor["spec"]["topologyName"]])
    mixed = Pool(
        name="mixed", nodes=(Node(name="a", num_gpus=8, fabric="f"), Node(name="b", num_gpus=8)), gpu_type="h100-80gb", max_gpus_per_job=8
    )  # fmt: skip
    assert dict(kueue.node_labels([mixed]))["b"]["ft-platform/fabric"] == "mixed-other"


def test_slots_of_one_machine_are_no_clusters() -> None:
    with pytest.raises(ValueError, match="no pool has GPUs of a cluster"):
        kueue.render([local_pool(4)])
    assert kueue.on_cluster([local_pool(4), SPOT]) == [SPOT]
