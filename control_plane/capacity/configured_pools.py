"""The pools of an installation, read from the YAML file that ``FT_POOLS`` names into :mod:`.pools`.

Errors name the place in the file, the value, the allowed values and the next step. Beyond single fields, these rules are checked:

1. Names of pools and of nodes are unique, because a reservation refers to nodes by name alone.
2. A pool's widest gang fits its nodes: one node, or equal nodes of one fabric.
3. Pools that take the same class have one type of GPU: a job's memory, batch and duration are planned for one type, and must hold in each
   pool that it waits for.
4. A class that a spot pool takes also has another pool: spot GPUs are reclaimed, and the job must be able to resume elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import sqlalchemy as sa
import yaml

from control_plane.billing import prices
from control_plane.billing.prices import PRICINGS
from control_plane.capacity import gpu_devices
from control_plane.capacity.pools import JOB_CLASSES, Node, Packing, Pool, largest_gang, local_pool, taking
from control_plane.capacity.tables import node_drains
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings
from ft_assets.errors import InvalidRequest, Unavailable
from ft_assets.training.memory import COUNTS, GPUS

POOL_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", re.ASCII)
"""A DNS label, short enough to be part of the names of a cluster's queues (63 characters, tier and tenant included)."""
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)
"""Kubernetes names a node by its host name, and label values have at most 63 characters."""
FABRIC_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?", re.ASCII)
MAX_NODE_GPUS = 16
"""The most built into one machine so far (16 V100 behind one switch); more is probably a typo."""
MAX_NODES = 10_000
"""Ten times the 1,000 nodes at which decisions are measured."""
WIDEST = COUNTS[-1]
"""Jobs request at most this many, so no default is wider."""
W = TypeVar("W", bound=str)
POOL_FIELDS = ("name", "gpu_type", "nodes", "takes", "packing", "pricing", "reserved_gpus", "max_gpus_per_job")
NODE_FIELDS = ("name", "count", "gpus", "prefix", "fabric", "nodes_per_fabric")


def load(path: Path, *, gpu_types: Collection[str]) -> tuple[Pool, ...]:
    """Return the pools in `path`; ``ValueError`` names the wrong entry."""
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"the pools in {path} cannot be read: {e}; FT_POOLS names that file") from e
    return parse(body, gpu_types=gpu_types, origin=str(path))


def parse(body: Any, *, gpu_types: Collection[str], origin: str = "pools") -> tuple[Pool, ...]:
    """Return the pools that `body` describes. `gpu_types`: those that the memory estimate and the price list know."""
    fields = _fields(body, origin, ("pools",))
    entries = _list(fields.get("pools"), f"{origin}: pools", "describe at least one pool")
    pools = tuple(_pool(entry, f"{origin}: pools[{i}]", gpu_types) for i, entry in enumerate(entries))
    _check_unique([p.name for p in pools], f"{origin}: pool")
    _check_unique([n.name for p in pools for n in p.nodes], f"{origin}: node")
    _check_classes(pools, origin)
    return pools


def _pool(body: Any, where: str, gpu_types: Collection[str]) -> Pool:
    fields = _fields(body, where, POOL_FIELDS, needed=("name", "gpu_type", "nodes"))
    name = _name(fields["name"], POOL_NAME, f"{where}.name", "lower-case letters, digits and '-', a letter first, at most 30")
    groups = _list(fields["nodes"], f"{where}.nodes", "describe at least one node")
    nodes = _nodes(groups, f"{where}.nodes", pool=name)
    total, gang = sum(n.num_gpus for n in nodes), largest_gang(nodes)
    widest = _whole(fields.get("max_gpus_per_job", min(gang, WIDEST)), 1, 10**6, f"{where}.max_gpus_per_job")
    if widest > gang:
        raise ValueError(
            f"{where}.max_gpus_per_job is {widest}, and the widest gang that its nodes hold (one node, or equal nodes of one fabric) has "
            f"{gang} GPUs; write {gang} or fewer, or give the nodes one fabric"
        )
    return Pool(
        name=name,
        nodes=nodes,
        gpu_type=_word(fields["gpu_type"], sorted(gpu_types), f"{where}.gpu_type"),
        max_gpus_per_job=widest,
        reserved_gpus=_whole(fields.get("reserved_gpus", 0), 0, total, f"{where}.reserved_gpus"),
        pricing=_word(fields.get("pricing", "on_demand"), PRICINGS, f"{where}.pricing"),
        takes=_classes(fields.get("takes", []), f"{where}.takes"),
        packing=_word(fields.get("packing", "dense"), get_args(Packing), f"{where}.packing"),
    )


def _nodes(groups: list[Any], where: str, *, pool: str) -> tuple[Node, ...]:
    """Return named nodes as they are, and counted ones as PREFIX-0, PREFIX-1, ...; numbering continues across groups with the same
    prefix."""
    made: list[Node] = []
    given: Counter[str] = Counter()
    for i, group in enumerate(groups):
        made += _group(group, f"{where}[{i}]", pool, given)
    if len(made) > MAX_NODES:
        raise ValueError(f"{where} are {len(made)} nodes, at most {MAX_NODES} make a pool; split it")
    return tuple(made)


def _group(body: Any, where: str, pool: str, given: Counter[str]) -> list[Node]:
    fields = _fields(body, where, NODE_FIELDS, needed=("gpus",))
    gpus = _whole(fields["gpus"], 1, MAX_NODE_GPUS, f"{where}.gpus")
    fabric = fields.get("fabric", "")
    if fabric != "":
        fabric = _name(fabric, FABRIC_NAME, f"{where}.fabric", "lower-case letters, digits, '-' and '.', at most 50")
    if "name" in fields:
        if other := [n for n in ("count", "prefix", "nodes_per_fabric") if n in fields]:
            raise ValueError(f"{where} has both name and {other[0]}; write name for one node, or count for several")
        name = _name(fields["name"], NODE_NAME, f"{where}.name", "a host name of at most 63 characters")
        return [Node(name=name, num_gpus=gpus, fabric=fabric)]
    if "count" not in fields:
        raise ValueError(f"{where} has neither name nor count; write name for one node, or count for several")
    count = _whole(fields["count"], 1, MAX_NODES, f"{where}.count")
    each = _whole(fields.get("nodes_per_fabric", 0), 0, MAX_NODES, f"{where}.nodes_per_fabric")
    if each and not fabric:
        raise ValueError(f"{where}.nodes_per_fabric is {each} without a fabric; name what the fabrics are called: fabric: rail")
    prefix = _name(fields.get("prefix", pool), NODE_NAME, f"{where}.prefix", "the start of a host name")
    first = given[prefix]
    given[prefix] += count
    called = [f"{fabric}-{i // each}" if each else fabric for i in range(count)]
    return [Node(name=f"{prefix}-{first + i}", num_gpus=gpus, fabric=called[i]) for i in range(count)]


def _check_unique(names: list[str], what: str) -> None:
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"{what} {twice[0]} appears {names.count(twice[0])} times; give each a unique name")


def _check_classes(pools: tuple[Pool, ...], origin: str) -> None:
    for kind in JOB_CLASSES:
        found = taking(pools, kind)
        for other in found[1:]:
            if other.gpu_type != found[0].gpu_type:
                raise ValueError(
                    f"{origin}: pools {found[0].name} ({found[0].gpu_type}) and {other.name} ({other.gpu_type}) both take class {kind}, "
                    "and jobs of a class are planned for one type of GPU; write `takes` so that each class has one"
                )
        if found and all(p.pricing == "spot" for p in found):
            raise ValueError(
                f"{origin}: class {kind} is taken by spot pool {found[0].name} alone, and jobs preempted there could not resume elsewhere; "
                f"add {kind} to the `takes` of a pool that is on demand or reserved, or take it out here"
            )


def _classes(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r}; write a list of {', '.join(JOB_CLASSES)}, or leave it out to take all")
    return frozenset(_word(one, JOB_CLASSES, f"{where}[{i}]") for i, one in enumerate(value))


def _fields(body: Any, where: str, known: tuple[str, ...], *, needed: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise ValueError(f"{where} is {type(body).__name__}, not a mapping; it has {', '.join(known)}")
    if unknown := [name for name in body if name not in known]:
        raise ValueError(f"{where}: {str(unknown[0])[:80]} is unknown; it has {', '.join(known)}")
    if missing := [name for name in needed if name not in body]:
        raise ValueError(f"{where}: {missing[0]} is missing; it needs {', '.join(needed)}")
    return body


def _list(value: Any, where: str, needed: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {value!r}; {needed}")
    return value


def _whole(value: Any, least: int, most: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{where} is {str(value)[:80]!r}; it is a whole number in {least}..{most}")
    return value


def _word(value: Any, words: Collection[W], where: str) -> W:
    for word in words:
        if value == word:
            return word
    raise ValueError(f"{where} is {str(value)[:80]!r}; use one of {', '.join(words)}")


def _name(value: Any, form: re.Pattern[str], where: str, reported: str) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"{where} is {str(value)[:80]!r}; use {reported}")
    return value


def configured(settings: Settings, at: datetime) -> list[Pool]:
    """Return the configured pools; raises ``InvalidRequest`` (``invalid_pools``) with the wrong entry of the file.

    `at`: when their GPUs need a price. The file is read once per process, and prices are only ever added to the list.
    """
    try:
        if settings.pools_file is None:
            found: Sequence[Pool] = [local_pool(settings.local_gpus, premium=settings.premium_gpus)]
        else:
            found = _read(settings.pools_file, tuple(sorted(prices.load(settings.prices_file).at(at).gpus)))
    except ValueError as e:
        raise InvalidRequest(str(e), code="invalid_pools") from e
    return [_as_wide_as_this_machine(pool) if pool.gpu_type == "local" else pool for pool in found]


def _as_wide_as_this_machine(pool: Pool) -> Pool:
    """Return `pool` with jobs limited to as many ranks as this machine has GPUs: jobs can share a GPU, the ranks of one job cannot."""
    num_gpus = len(gpu_devices.visible())
    return replace(pool, max_gpus_per_job=min(num_gpus, pool.max_gpus_per_job)) if num_gpus else pool


@cache
def _read(path: Path, priced: tuple[str, ...]) -> tuple[Pool, ...]:
    """A type of GPU is known if its memory and its price are."""
    return load(path, gpu_types=[name for name in GPUS if name in priced])


def planned(platform: Platform) -> list[Pool]:
    """Return the pools with all their nodes, drained ones included: for submissions, plans and prices."""
    return configured(platform.settings, platform.clock())


def pools(platform: Platform, conn: sa.Connection | None = None) -> list[Pool]:
    """Return the pools without drained nodes. `conn`: the transaction to read in, if there is one."""
    if conn is None:
        with platform.whole.engine.connect() as own:
            return pools(platform, own)
    drained = set(conn.execute(sa.select(node_drains.c.node)).scalars())
    return [_without(pool, drained) for pool in planned(platform)]


def named(platform: Platform, name: str) -> Pool:
    """Return the pool that a reservation names."""
    for pool in planned(platform):
        if pool.name == name:
            return pool
    raise Unavailable(
        f"a job holds GPUs of pool {name}, which the file of FT_POOLS ({platform.settings.pools_file}) no longer lists; put it back "
        "and drain its nodes (ft admin nodes drain) until its jobs have ended",
        code="unknown_pool",
    )


def _without(pool: Pool, drained: set[str]) -> Pool:
    if drained.isdisjoint(n.name for n in pool.nodes):
        return pool
    return replace(pool, nodes=tuple(replace(n, ready=n.ready and n.name not in drained) for n in pool.nodes))
