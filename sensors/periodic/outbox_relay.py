"""Webhooks and e-mails are sent, also while the API is away; old events are forgotten."""

import dagster as dg

from control_plane.notifications import outbox as box
from control_plane.notifications.dispatch import Dispatcher
from ft_assets.platform_resource import PlatformResource

FOR_S = 20.0
"""A tick begins nothing new after that: user code has 60 s."""


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def outbox(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Send what is due; the API does the same while it runs, and what one of them has begun the other leaves alone."""
    opened = platform.get()
    forgotten = box.forget(opened)
    done = Dispatcher(opened).drain(for_s=FOR_S)
    return dg.SkipReason(f"{done} done, {forgotten} old events forgotten" if done or forgotten else "nothing to send")
