"""ReservationPlan under a strict eye: a late start is excused by what happened where it was promised, and by nothing else."""

from __future__ import annotations

import pytest

from benchmarks.scheduler.simulation.policies import Policy
from engine.scheduler import Decision, Reason, Reservation, Snapshot, Start, Wait
from engine.scheduler.pools import Pool, equal_nodes
from engine.scheduler.simulation.cluster_simulation import Simulation
from engine.scheduler.simulation.reservation_watch import ReservationWatch
from engine.scheduler.simulation.simulated_job import SimulatedJob

HEARD = 0.0


def pool(*, reserved: int = 0) -> Pool:
    return Pool(name="gpus", nodes=equal_nodes(32), gpu_type="h100-80gb", max_gpus_per_job=32, reserved_gpus=reserved)


def promise(at: float, *names: str) -> Reservation:
    return Reservation(start=at, pool="gpus", placement=tuple((name, 8) for name in names), made_at=HEARD)


def heard(*, reserved: int = 0, tier: str = "standard") -> ReservationWatch:
    reservations = ReservationWatch(pools=[pool(reserved=reserved)])
    reservations.note("late", tier, promise(100.0, "node-0", "node-1"))
    return reservations


@pytest.mark.parametrize(
    ("nodes_of", "by", "tier", "reserved", "excused"),
    [
        (["node-1"], "standard", "standard", 0, True),
        (["node-2", "node-3"], "standard", "standard", 0, False),
        (["node-2"], "free", "standard", 8, True),  # both share what is not reserved
        (["node-2"], "premium", "standard", 8, False),
        (["node-2"], "standard", "premium", 8, False),
    ],
)
def test_only_what_held_its_nodes_or_its_budget_excuses(nodes_of: list[str], by: str, tier: str, reserved: int, excused: bool) -> None:
    reservations = heard(reserved=reserved, tier=tier)
    reservations.disturb("gpus", nodes_of, by)
    reservations.disturb("another pool", ["node-0"], by)
    reservations.judge("late", 200.0, "gpus", ["node-0", "node-1"], tier)
    assert (len(reservations.broken), reservations.slipped) == ((0, 1) if excused else (1, 0))


def test_what_happened_before_the_promise_excuses_nothing() -> None:
    reservations = ReservationWatch(pools=[pool()])
    reservations.disturb("gpus", ["node-0"], "standard")
    reservations.note("late", "standard", promise(100.0, "node-0"))
    reservations.judge("late", 200.0, "gpus", ["node-0"], "standard")
    assert reservations.broken == [("late", 100.0, 200.0)]


def test_a_later_word_takes_no_earlier_promise_back() -> None:
    reservations = heard()
    reservations.note("late", "standard", promise(300.0, "node-3"))
    reservations.judge("late", 200.0, "gpus", ["node-3"], "standard")
    assert reservations.broken == [("late", 100.0, 200.0)]


def test_who_starts_late_for_a_good_reason_excuses_those_behind_it() -> None:
    reservations = heard()
    reservations.note("behind", "standard", promise(150.0, "node-1"))
    reservations.note("beside", "standard", promise(150.0, "node-2"))
    reservations.disturb("gpus", ["node-0"], "standard")
    reservations.judge("late", 120.0, "gpus", ["node-0", "node-1"], "standard")
    reservations.judge("behind", 170.0, "gpus", ["node-1"], "standard")
    reservations.judge("beside", 170.0, "gpus", ["node-2"], "standard")
    assert reservations.slipped == 2
    assert [job for job, _, _ in reservations.broken] == ["beside"]


def scripted(orders: dict[str, tuple[float, str]]) -> Policy:
    """Starts each job at its moment on its node; promises node-0 at 100 to `late`."""

    def decide(snapshot: Snapshot, now: float) -> list[Decision]:
        said: list[Decision] = []
        for i, w in enumerate(snapshot.waiting):
            moment, node = orders[w.job_id]
            if now >= moment:
                said.append(Start(job_id=w.job_id, pool="gpus", num_gpus=8, placement=((node, 8),)))
            else:
                told = promise(100.0, "node-0") if w.job_id == "late" else None
                said.append(
                    Wait(job_id=w.job_id, position=i, reason=Reason.WAITING_FOR_QUOTA, detail="", expected_start=None, promise=told)
                )
        return said

    return decide


@pytest.mark.parametrize(("where", "broken", "slipped"), [("node-0", 0, 1), ("node-1", 1, 0)])
def test_a_job_that_overruns_elsewhere_excuses_no_late_start(where: str, broken: int, slipped: int) -> None:
    jobs = [SimulatedJob(job_id=name, submit_s=at, num_gpus=8, duration_s=150.0) for name, at in (("long", 0.0), ("late", 1.0))]
    simulation = Simulation(jobs, [pool()], scripted({"long": (0.0, where), "late": (150.0, "node-0")}))
    simulation.live["long"].record.estimate_s = 60.0
    outcome = simulation.run()
    assert (len(outcome.broken), outcome.slipped) == (broken, slipped)


def test_a_node_that_is_lost_elsewhere_excuses_no_late_start() -> None:
    jobs = [SimulatedJob(job_id=name, submit_s=at, num_gpus=8, duration_s=150.0) for name, at in (("long", 0.0), ("late", 1.0))]
    for lost, broken in (("node-3", 1), ("node-0", 0)):
        simulation = Simulation(jobs, [pool()], scripted({"long": (0.0, "node-1"), "late": (5000.0, "node-0")}))
        simulation._at(50.0, 3, f"gpus/{lost}")
        assert len(simulation.run().broken) == broken
