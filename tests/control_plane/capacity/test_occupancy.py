"""What of a pool is free, what lies together, and what a gang could have of it."""

from __future__ import annotations

from random import Random

import pytest

from control_plane.capacity.occupancy import Held, PoolUse, occupancy
from engine.scheduler.placement import PoolTimeline
from engine.scheduler.pools import Node, Packing, Pool


def pool(*sizes: int, packing: Packing = "dense", fabrics: str = "", ready: str = "") -> Pool:
    """Nodes n0, n1, ... of these sizes; `fabrics` names one a letter, `ready` says n for those that are not."""
    made = tuple(
        Node(name=f"n{i}", num_gpus=size, fabric=fabrics[i] if fabrics else "", ready=not ready or ready[i] == "y")
        for i, size in enumerate(sizes)
    )
    return Pool(name="p", nodes=made, gpu_type="local", max_gpus_per_job=64, packing=packing)


def use(of: Pool, *held: Held) -> PoolUse:
    (found,) = occupancy([of], held)
    return found


def held(job: str, gpus: int, *nodes: tuple[str, int], pool: str = "p") -> Held:
    return Held(job_id=job, pool=pool, num_gpus=gpus, placement=nodes)


def test_gpus_are_counted_on_the_nodes_that_a_reservation_names() -> None:
    found = use(pool(8, 8), held("a", 10, ("n0", 8), ("n1", 2)), held("b", 1, ("n1", 1)), held("c", 4, ("x", 4), pool="gone"))
    assert [(n.used, n.free, dict(n.jobs)) for n in found.nodes] == [(8, 0, {"a": 8}), (3, 5, {"a": 2, "b": 1})]
    assert (found.used, found.free, found.largest_free) == (11, 5, 5)


def test_a_reservation_without_nodes_is_counted_on_the_fullest() -> None:
    found = use(pool(8, 8), held("old", 6), held("a", 4, ("n1", 4)))
    assert [n.used for n in found.nodes] == [2, 8]
    assert found.free == 6


def test_a_node_that_is_not_ready_gives_nothing_and_keeps_what_runs() -> None:
    found = use(pool(8, 8, ready="yn"), held("a", 4, ("n1", 4)))
    assert (found.used, found.draining, found.free, found.largest_free) == (0, 4, 8, 8)


def test_used_and_free_gpus_add_up_to_those_of_the_ready_nodes() -> None:
    found = use(pool(8, 8, 8, ready="yny"), held("a", 12, ("n0", 8), ("n1", 4)), held("b", 5, ("n2", 5)))
    assert (found.used, found.free, found.draining) == (13, 3, 4)
    assert found.used + found.free == found.pool.num_gpus == 16


def test_too_few_are_not_called_apart() -> None:
    assert use(pool(8), held("a", 7, ("n0", 7))).apart(4) == 0
    assert use(pool(8, 8), held("a", 5, ("n0", 5)), held("b", 5, ("n1", 5))).apart(6) == 0, "no order of the two jobs gives six together"
    assert use(pool(8, 8, packing="whole_node"), held("a", 1, ("n0", 1))).apart(3) == 0, "the node of a job is its own"


def test_jobs_that_could_lie_closer_keep_gpus_apart() -> None:
    two = held("a", 3, ("n0", 3)), held("b", 3, ("n1", 3))
    assert use(pool(8, 8), *two).apart(8) == 8
    assert use(pool(8, 8), *two).closer().nodes[0].jobs == {"a": 3, "b": 3}
    assert use(pool(8, 8, packing="whole_node"), *two).apart(8) == 0, "each of them has its node to itself, wherever it lies"
    fabrics = pool(8, 8, 8, 8, packing="whole_node", fabrics="aabb")
    assert use(fabrics, held("a", 3, ("n0", 3)), held("b", 3, ("n2", 3))).apart(16) == 16, "in one fabric they would leave the other empty"
    assert use(pool(8, 8), held("wide", 12, ("n0", 6), ("n1", 6))).apart(4) == 0, "a job on several nodes stays where it is"


def test_a_node_of_one_job_alone_has_nothing_free() -> None:
    found = use(pool(8, 8, packing="whole_node"), held("a", 3, ("n0", 3)), held("old", 2))
    assert [(n.used, n.free) for n in found.nodes] == [(3, 0), (2, 0)]
    assert use(pool(8, 8, packing="whole_node"), held("a", 3, ("n0", 3))).largest_free == 8
    assert use(pool(8, packing="whole_node")).usable(3) == 3, "two gangs of three are no neighbours"


def test_what_gangs_could_have_is_what_the_policy_would_place() -> None:
    """Gangs of one width, one round after the other, until no more starts."""
    random = Random(7)
    for _ in range(60):
        packing: Packing = random.choice(("dense", "whole_node"))
        of = pool(*random.choices((4, 8), k=6), packing=packing, fabrics="aaabbb")
        taken = [held(f"r{i}", g, (n.name, g)) for i, n in enumerate(of.nodes) if (g := random.choice((0, 0, 1, 3)))]
        gang, starts = random.choice((1, 2, 3, 5, 8, 10, 12, 16)), 0
        timeline = PoolTimeline(of, 0.0)
        for one in taken:
            timeline.run(one.job_id, "premium", one.num_gpus, tuple(one.placement), 1e6)
        timeline.ready()
        while (placement := timeline.fits_now(gang, "premium", 60.0)) is not None:
            starts += 1
            timeline.start(f"g{starts}", "premium", placement, 60.0)
        assert use(of, *taken).usable(gang) == starts * gang, (of, taken, gang)
        assert use(of, *taken).apart(gang) >= 0


@pytest.mark.parametrize(
    ("case", "of", "taken", "gang", "usable"),
    [
        ("three of each node's five lie together once", pool(8, 8), (("n0", 3), ("n1", 3)), 3, 6),
        ("no node has four", pool(4, 4), (("n0", 1), ("n1", 1)), 4, 0),
        ("alone on a node: only an empty one counts", pool(8, 8, packing="whole_node"), (("n0", 1),), 4, 4),
        ("a wide gang takes empty nodes of one fabric", pool(8, 8, 8, 8, fabrics="aabb"), (("n0", 1),), 16, 16),
        ("what is left of a wide gang lies beside others", pool(8, 8), (("n0", 3),), 12, 12),
        ("but not where jobs have their nodes to themselves", pool(8, 8, packing="whole_node"), (("n0", 3),), 12, 0),
        ("two fabrics make no wide gang", pool(8, 8, fabrics="ab"), (), 16, 0),
        ("what is not ready counts for nothing", pool(8, 8, ready="yn"), (), 16, 0),
        ("nobody waits: all of it", pool(8, 8), (("n0", 3),), 0, 13),
    ],
)
def test_what_a_gang_could_have(case: str, of: Pool, taken: tuple[tuple[str, int], ...], gang: int, usable: int) -> None:
    found = use(of, held("a", sum(n for _, n in taken), *taken)) if taken else use(of)
    assert found.usable(gang) == usable, case
