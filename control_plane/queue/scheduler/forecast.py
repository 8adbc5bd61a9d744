"""When each waiting job is expected to start: a quick look ahead over the whole queue."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from control_plane.capacity.pools import RESERVED_FOR
from control_plane.queue.scheduler.model import Waiting
from control_plane.queue.scheduler.node_timeline import Room
from control_plane.queue.scheduler.placement import PoolRooms

Slots = list[tuple[float, int]]
"""A heap of moments and the GPUs that are free from each on."""


def forecast(
    jobs: Iterable[tuple[Waiting, Sequence[str]]],
    rooms: Mapping[str, PoolRooms],
    promised: Mapping[str, tuple[str, float]],
    now: float,
    *,
    in_turn: bool = False,
) -> dict[str, float]:
    """The expected start of each job that can start, if jobs take as long as expected and none is added.

    1. A job with a promise starts when and where it is promised.
    2. The others, in the queue's order, take the GPUs of their pools that are free first, and keep them as long as is expected.
    3. With `in_turn`, none starts in a pool before the one that was before it.
    4. Tiers below premium wait besides until enough of the GPUs that are not reserved are free.

    Nodes are not looked at: a gang that needs whole ones may start later, a short job that fits in between sooner.
    """
    every = {name: _slots(pool.rooms, now) for name, pool in rooms.items()}
    shared = {name: _slots([pool.shared], now) for name, pool in rooms.items()}
    last = dict.fromkeys(rooms, now)
    starts: dict[str, float] = {}
    for job, pools in jobs:
        kept = promised.get(job.job_id)
        best: tuple[float, str] | None = None
        for name in (kept[0],) if kept else pools:
            heaps = [every[name]] if job.tier == RESERVED_FOR else [every[name], shared[name]]
            moments = [_first(heap, job.num_gpus) for heap in heaps]
            if None in moments:
                continue
            start = max(last[name] if in_turn else now, *(m for m in moments if m is not None))
            if best is None or start < best[0]:
                best = (start, name)
        if best is None:
            continue
        start, name = best
        if kept:
            start = max(now, kept[1])
        starts[job.job_id] = last[name] = start
        _take(every[name], job.num_gpus, start + job.expected_s)
        if job.tier != RESERVED_FOR:
            _take(shared[name], job.num_gpus, start + job.expected_s)
    return starts


def _slots(rooms: Iterable[Room], now: float) -> Slots:
    slots: defaultdict[float, int] = defaultdict(int)
    for room in rooms:
        slots[now] += max(0, room.free)
        for end, n, _ in room.ends:
            slots[end] += n
    return sorted(slots.items())


def _first(slots: Slots, num_gpus: int) -> float | None:
    """When `num_gpus` are free."""
    popped: Slots = []
    found = None
    while slots and found is None:
        time, n = heapq.heappop(slots)
        popped.append((time, n))
        num_gpus -= n
        if num_gpus <= 0:
            found = time
    for slot in popped:
        heapq.heappush(slots, slot)
    return found


def _take(slots: Slots, num_gpus: int, until: float) -> None:
    """Hold the `num_gpus` that are free first, until `until`."""
    left = num_gpus
    while left > 0 and slots:
        time, n = heapq.heappop(slots)
        if n > left:
            heapq.heappush(slots, (time, n - left))
            n = left
        left -= n
    heapq.heappush(slots, (until, num_gpus - left))
