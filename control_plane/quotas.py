"""Admission: whether a tenant's next job fits its limits. Pure: a snapshot in, a decision with its reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from control_plane.tenants import LARGE_MODEL_PARAMETERS, Tenant, tier_named


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a tenant holds now; taken under the lock of its row, or two submissions see the same room."""

    jobs_in_flight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a submission asks for, as far as limits go."""

    tier: str
    full_parameters: bool = False
    num_parameters: int = 0
    """Of the base model."""


class Refusal(NamedTuple):
    code: str
    detail: str


def admit(tenant: Tenant, usage: Usage, ask: Ask) -> Refusal | None:
    """None if the job may enter, else why not. The rules, in the order in which they are tried:

    1. A job runs in its tenant's tier or in a lower one.
    2. Full-parameter training and 70B-class models are for tiers that include them.
    3. Jobs in flight stay within the tenant's limit.
    """
    tiers = ("free", "standard", "premium")
    if tiers.index(tier_named(ask.tier).name) > tiers.index(tier_named(tenant.tier).name):
        return Refusal("tier_not_allowed", f"tier {ask.tier} is above the tenant's tier {tenant.tier}; ask for {tenant.tier} or less")
    may_train_full = tier_named(ask.tier).may_train_full
    if ask.full_parameters and not may_train_full:
        return Refusal("tier_not_allowed", f"full-parameter training is not part of tier {ask.tier}; use method lora, or tier premium")
    if ask.num_parameters >= LARGE_MODEL_PARAMETERS and not may_train_full:
        size = f"{ask.num_parameters / 1e9:.0f}B"
        return Refusal(
            "tier_not_allowed",
            f"a model of {size} parameters is not part of tier {ask.tier}, whose limit is {LARGE_MODEL_PARAMETERS / 1e9:.0f}B; "
            "choose a smaller model, or tier premium",
        )
    if usage.jobs_in_flight >= tenant.max_jobs_in_flight:
        return Refusal(
            "exceeded_quota",
            f"{usage.jobs_in_flight} jobs are in flight and the limit of tenant {tenant.id} is {tenant.max_jobs_in_flight}; "
            "wait until one ends, or cancel one",
        )
    return None
