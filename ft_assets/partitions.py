"""Partition keys ``<tenant>:<job>`` and ``<tenant>:<dataset version>``: definitions, building, parsing, and which versions a job uses.

One composite key per job instead of tenant x job: two dynamic dimensions make a full cross product (500 x 1,000 = 500,000 cells, 10 s to
list), of which all but one cell per job are meaningless.
"""

from collections.abc import Callable, Iterable
from typing import Any

import dagster as dg

from core.layout import checked_id

JOBS = dg.DynamicPartitionsDefinition(name="jobs")
DATASETS = dg.DynamicPartitionsDefinition(name="datasets")


def partition_key(tenant: str, name: str) -> str:
    """Returns ``<tenant>:<name>``; both parts are ids, so neither can contain the separator."""
    return f"{checked_id(tenant, what='tenant')}:{checked_id(name)}"


def parse(key: str) -> tuple[str, str]:
    """Returns the tenant and the job of a partition key."""
    tenant, sep, name = key.partition(":")
    if not sep:
        raise ValueError(f"partition key {key!r} is not of the form <tenant>:<job>")
    return checked_id(tenant, what="tenant"), checked_id(name)


class PinnedVersions(dg.PartitionMapping):
    """Maps a job's partition to the dataset versions that the job uses; `versions_of` returns their keys.

    A run evaluates it, and records those versions as its input. Dagster's webserver knows only its own mappings and ignores this one.
    """

    description = "the dataset versions that the job uses"

    def __init__(self, versions_of: Callable[[str], Iterable[str]]) -> None:
        self._versions_of = versions_of

    def validate_partition_mapping(self, upstream_partitions_def: Any, downstream_partitions_def: Any) -> None:
        """Accept any definitions: there is one use."""

    def get_upstream_mapped_partitions_result_for_partitions(
        self, downstream_partitions_subset: Any, downstream_partitions_def: Any, upstream_partitions_def: Any, *more: Any, **named: Any
    ) -> Any:
        jobs = downstream_partitions_subset.get_partition_keys() if downstream_partitions_subset else ()
        pinned = dg.SpecificPartitionsPartitionMapping([version for job in jobs for version in self._versions_of(job)])
        return pinned.get_upstream_mapped_partitions_result_for_partitions(
            downstream_partitions_subset, downstream_partitions_def, upstream_partitions_def, *more, **named
        )

    def get_downstream_partitions_for_partitions(
        self,
        upstream_partitions_subset: Any,  # noqa: ARG002
        upstream_partitions_def: Any,  # noqa: ARG002
        downstream_partitions_def: Any,
        *_: Any,
        **__: Any,
    ) -> Any:
        """Return none: no job starts, or is outdated, because a dataset version was reported."""
        return downstream_partitions_def.empty_subset()
