"""A tenant as policies see it, without a database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from control_plane.tenants.rules import Tenant, tier_named


def a_tenant(tier: str = "standard", **limits: Any) -> Tenant:
    """A tenant with the limits of its tier, but for those given."""
    t = tier_named(tier)
    made = Tenant(
        id="acme", name="Acme", tier=tier, max_jobs_in_flight=t.max_jobs_in_flight, soft_gpu_hours=t.soft_gpu_hours,
        hard_gpu_hours=t.hard_gpu_hours, requests_per_minute=t.requests_per_minute,
    )  # fmt: skip
    return replace(made, **limits)
