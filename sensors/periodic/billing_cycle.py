"""Attempts are billed, storage is sampled, budgets are watched and invoices are issued: whatever is due, in every round."""

import logging
from collections.abc import Callable, Mapping

import dagster as dg

from control_plane.billing import budgets, storage_usage
from control_plane.billing.invoices import service as invoices
from control_plane.billing.metering import service
from control_plane.platform.context import Platform
from ft_assets.platform_resource import PlatformResource

log = logging.getLogger(__name__)

ROUNDS: Mapping[str, Callable[[Platform], object]] = {
    "attempts billed late": service.settle_due,
    "tenants whose storage was sampled": storage_usage.sample_due,
    "budget alerts": budgets.alert_due,
    "invoices issued": lambda platform: len(invoices.issue_due(platform)),
}
"""In this order: an invoice waits for what is not billed, and alerts count what just was."""


@dg.sensor(minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def metering(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """One round over everything that is due; what fails is told, keeps nothing else from going, and is tried again."""
    return dg.SkipReason(one_round(platform.get()))


def one_round(platform: Platform) -> str:
    told = []
    for what, work in ROUNDS.items():
        try:
            told.append(f"{what}: {work(platform)}")
        except Exception as error:
            log.exception("%s: the round has failed", what)
            told.append(f"{what}: failed, {type(error).__name__}: {str(error)[:200]}")
    return "; ".join(told)
