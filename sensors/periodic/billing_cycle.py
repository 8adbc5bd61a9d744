"""Bills attempts, samples storage, watches budgets and issues invoices: whatever is due at each tick."""

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
"""In this order, because an invoice waits for unbilled attempts, and alerts count what was just billed."""


@dg.sensor(minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def metering(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Does everything that is due; failures are logged, do not stop the rest, and are retried."""
    return dg.SkipReason(one_round(platform.get()))


def one_round(platform: Platform) -> str:
    reported = []
    for what, work in ROUNDS.items():
        try:
            reported.append(f"{what}: {work(platform)}")
        except Exception as error:
            log.exception("%s: the round has failed", what)
            reported.append(f"{what}: failed, {type(error).__name__}: {str(error)[:200]}")
    return "; ".join(reported)
