"""``/v1/quota``: the limits of the caller's tenant, and what is left of them."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.http.authentication import PlatformDep, Reader
from control_plane.platform.epoch_time import epoch_seconds
from control_plane.quotas import rules as policy
from control_plane.quotas import schemas
from control_plane.quotas import service as quotas
from control_plane.tenants.rules import tier_named

router = APIRouter(prefix="/v1/quota", tags=["quota"])


@router.get("", summary="Retrieve your quota")
def retrieve(platform: PlatformDep, tenant: Reader) -> schemas.Quota:
    """Return your limits and what you have used, reserved and left this month."""
    found = quotas.tenant_quota(platform, tenant)
    owner, at, tier = found.tenant, found.standing, tier_named(found.tenant.tier)
    left = policy.left_s(owner, at)
    soft = owner.soft_gpu_hours
    return schemas.Quota(
        tenant=owner.id,
        tier=owner.tier,
        month=found.month.name,
        month_ends_at=epoch_seconds(found.month.ends),
        soft_gpu_hours=soft,
        hard_gpu_hours=owner.hard_gpu_hours,
        used_gpu_hours=quotas.in_hours(at.used_s),
        running_gpu_hours=quotas.in_hours(at.running_s),
        held_gpu_hours=quotas.in_hours(at.held_s),
        left_gpu_hours=None if left is None else quotas.in_hours(left),
        overage_gpu_hours=0.0 if soft is None else quotas.in_hours(max(0.0, at.used_s - soft * policy.HOUR_S)),
        at_hard_cap=policy.at_cap(owner, at),
        on_hard_cap=quotas.on_hard_cap(owner),
        jobs_in_flight=found.jobs_in_flight,
        max_jobs_in_flight=owner.max_jobs_in_flight,
        jobs_paused_for_cap=found.paused_for_cap,
        starts_within_s=tier.starts_within_s,
        may_train_full=tier.may_train_full,
        max_file_bytes=tier.max_file_bytes,
        max_examples=tier.max_examples,
        requests_per_minute=owner.requests_per_minute,
    )
