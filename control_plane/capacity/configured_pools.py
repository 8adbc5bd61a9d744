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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from control_plane.billing import prices
from control_plane.capacity import gpu_devices
from control_plane.capacity.tables import node_drains
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings
from core import yaml_files
from core.base_models import REPOSITORY_ROOT
from core.errors import InvalidRequest, Unavailable
from engine.scheduler import (
    CPU_PER_GPU,
    JOB_CLASSES,
    MEMORY_GIB_PER_GPU,
    Node,
    Packing,
    Pool,
    PoolClass,
    Pricing,
    evaluation_class,
    largest_gang,
    local_pool,
    pools_taking,
)
from engine.training import GANG_SIZES, GPUS

PLANNED = REPOSITORY_ROOT / "deploy" / "pools.yaml"
"""The pools of the planned installation."""
POOL_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", re.ASCII)
"""A DNS label, short enough to be part of the names of a cluster's queues (63 characters, tier and tenant included)."""
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)
"""Kubernetes names a node by its host name, and label values have at most 63 characters."""
FABRIC_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?", re.ASCII)
MAX_NODE_GPUS = 16
"""The most built into one machine so far (16 V100 behind one switch); more is probably a typo."""
MAX_NODES = 10_000
"""Ten times the 1,000 nodes at which decisions are measured."""
WIDEST = GANG_SIZES[-1]
"""Jobs request at most this many, so no default is wider."""
Whole = Annotated[int, Field(strict=True, ge=0)]
EXACTLY = ConfigDict(extra="forbid")


def _name(form: re.Pattern[str], allowed: str) -> AfterValidator:
    def check(name: str) -> str:
        if not form.fullmatch(name):
            raise ValueError(f"use {allowed}")
        return name

    return AfterValidator(check)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Nodes:
    """One node by name, or several by count."""

    __pydantic_config__ = EXACTLY

    gpus: Annotated[Whole, Field(ge=1, le=MAX_NODE_GPUS)]
    name: Annotated[str, _name(NODE_NAME, "a host name of at most 63 characters")] | None = None
    count: Annotated[Whole, Field(ge=1, le=MAX_NODES)] | None = None
    prefix: Annotated[str, _name(NODE_NAME, "the start of a host name")] | None = None
    fabric: Annotated[str, _name(FABRIC_NAME, "lower-case letters, digits, '-' and '.', at most 50")] | None = None
    nodes_per_fabric: Annotated[Whole, Field(le=MAX_NODES)] = 0

    def __post_init__(self) -> None:
        if self.name is None and self.count is None:
            raise ValueError("it has neither name nor count; write name for one node, or count for several")
        if self.name is not None and (self.count or self.prefix or self.nodes_per_fabric):
            raise ValueError("it has both name and count, prefix or nodes_per_fabric; write name for one node, or count for several")
        if self.nodes_per_fabric and self.fabric is None:
            raise ValueError(
                f"nodes_per_fabric is {self.nodes_per_fabric} without a fabric; name what the fabrics are called: fabric: rail"
            )

    def named(self, pool: str, given: Counter[str]) -> list[Node]:
        """Return a named node as it is, and counted ones as PREFIX-0, PREFIX-1, ...; numbering continues across groups."""
        fabric, each = self.fabric or "", self.nodes_per_fabric
        if self.count is None:
            return [Node(name=self.name or "", num_gpus=self.gpus, fabric=fabric)]
        prefix = self.prefix or pool
        first = given[prefix]
        given[prefix] += self.count
        called = [f"{fabric}-{i // each}" if each else fabric for i in range(self.count)]
        return [Node(name=f"{prefix}-{first + i}", num_gpus=self.gpus, fabric=name) for i, name in enumerate(called)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """A pool as its file describes it."""

    __pydantic_config__ = EXACTLY

    name: Annotated[str, _name(POOL_NAME, "lower-case letters, digits and '-', a letter first, at most 30")]
    gpu_type: str
    nodes: Annotated[list[_Nodes], Field(min_length=1)]
    takes: frozenset[PoolClass] = frozenset()
    packing: Packing = "dense"
    pricing: Pricing = "on_demand"
    reserved_gpus: Whole = 0
    max_gpus_per_job: Annotated[Whole, Field(ge=1)] | None = None
    cpu_per_gpu: Annotated[Whole, Field(ge=1)] = CPU_PER_GPU
    memory_gib_per_gpu: Annotated[Whole, Field(ge=1)] = MEMORY_GIB_PER_GPU

    def pool(self, gpu_types: Collection[str]) -> Pool:
        """Return the pool; ``ValueError`` if it has a type of GPU that is not in `gpu_types`, or its numbers do not fit its nodes."""
        given: Counter[str] = Counter()
        nodes = tuple(node for group in self.nodes for node in group.named(self.name, given))
        total, gang = sum(n.num_gpus for n in nodes), largest_gang(nodes)
        if self.gpu_type not in gpu_types:
            raise ValueError(f"gpu_type is {self.gpu_type!r}; use one of {', '.join(sorted(gpu_types))}")
        if len(nodes) > MAX_NODES:
            raise ValueError(f"nodes are {len(nodes)}, at most {MAX_NODES} make a pool; split it")
        if self.reserved_gpus > total:
            raise ValueError(f"reserved_gpus is {self.reserved_gpus}, and its nodes have {total} GPUs; write {total} or fewer")
        if self.max_gpus_per_job is not None and self.max_gpus_per_job > gang:
            raise ValueError(
                f"max_gpus_per_job is {self.max_gpus_per_job}, and the widest gang that its nodes hold (one node, or equal nodes of one "
                f"fabric) has {gang} GPUs; write {gang} or fewer, or give the nodes one fabric"
            )
        return Pool(
            name=self.name, nodes=nodes, gpu_type=self.gpu_type, max_gpus_per_job=self.max_gpus_per_job or min(gang, WIDEST),
            reserved_gpus=self.reserved_gpus, pricing=self.pricing, takes=self.takes, packing=self.packing,
            cpu_per_gpu=self.cpu_per_gpu, memory_gib_per_gpu=self.memory_gib_per_gpu,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    __pydantic_config__ = EXACTLY

    pools: Annotated[list[_Pool], Field(min_length=1)]


def load(path: Path, *, gpu_types: Collection[str]) -> tuple[Pool, ...]:
    """Return the pools in `path`; ``ValueError`` names the wrong entry."""
    return _checked(yaml_files.read(path, TypeAdapter(_File), setting="FT_POOLS"), gpu_types, str(path))


def parse(body: Any, *, gpu_types: Collection[str], origin: str = "pools") -> tuple[Pool, ...]:
    """Return the pools that `body` describes. `gpu_types`: those that the memory estimate and the price list know."""
    return _checked(yaml_files.parse(body, TypeAdapter(_File), origin=origin), gpu_types, origin)


def _checked(file: _File, gpu_types: Collection[str], origin: str) -> tuple[Pool, ...]:
    pools = []
    for i, described in enumerate(file.pools):
        try:
            pools.append(described.pool(gpu_types))
        except ValueError as error:
            raise ValueError(f"{origin}: pools[{i}].{error}") from None
    _check_unique([p.name for p in pools], f"{origin}: pool")
    _check_unique([n.name for p in pools for n in p.nodes], f"{origin}: node")
    _check_classes(pools, origin)
    return tuple(pools)


def _check_unique(names: list[str], what: str) -> None:
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"{what} {twice[0]} appears {names.count(twice[0])} times; give each a unique name")


def _check_classes(pools: Sequence[Pool], origin: str) -> None:
    for kind in dict.fromkeys((*JOB_CLASSES, evaluation_class(pools, JOB_CLASSES[0]))):
        found = pools_taking(pools, kind)
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
