"""Partition keys ``<tenant>:<job>``: definition, construction and parsing.

Uses one composite key per job instead of tenant x job: two dynamic dimensions form a full cross product (500 x 1,000 = 500,000 cells, 10 s
to list), in which only one cell per job is meaningful.
"""

import dagster as dg

from ft_assets.layout import checked_id

JOBS = dg.DynamicPartitionsDefinition(name="jobs")


def partition_key(tenant: str, name: str) -> str:
    """Returns ``<tenant>:<name>``. Both parts are ids and so cannot contain the separator."""
    return f"{checked_id(tenant, what='tenant')}:{checked_id(name)}"


def parse(key: str) -> tuple[str, str]:
    """Returns the tenant and the job of a partition key."""
    tenant, sep, name = key.partition(":")
    if not sep:
        raise ValueError(f"partition key {key!r} is not of the form <tenant>:<job>")
    return checked_id(tenant, what="tenant"), checked_id(name)
