"""``/v1/quota``: the limits of the caller's tenant, and what is left of them."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from control_plane.http.authentication import PlatformDep, Reader
from control_plane.quotas import rules as policy
from control_plane.quotas import schemas
from control_plane.quotas import service as quotas
from control_plane.tenants.rules import tier_named

router = APIRouter(prefix="/v1/quota", tags=["quota"])


@router.get("", summary="Retrieve your quota")
def retrieve(platform: PlatformDep, tenant: Reader) -> schemas.Quota:
    """Return your limits and what you have used, reserved and left this month."""
    found = quotas.tenant_quota(platform, tenant)
    owner, at, soft = found.tenant, found.standing, found.tenant.soft_gpu_hours
    tier = tier_named(owner.tier)
    return schemas.Quota.model_validate({
        **asdict(tier),
        "starts_within_s": tier.starts_within_s,
        **asdict(owner),
        **quotas.month_in_hours(owner, found.month, at),
        "tenant": owner.id,
        "month_ends_at": found.month.ends,
        "running_gpu_hours": quotas.in_hours(at.running_s),
        "overage_gpu_hours": 0.0 if soft is None else quotas.in_hours(max(0.0, at.used_s - soft * policy.HOUR_S)),
        "at_hard_cap": policy.at_cap(owner, at),
        "jobs_in_flight": found.jobs_in_flight,
        "jobs_paused_for_cap": found.paused_for_cap,
    })  # fmt: skip
