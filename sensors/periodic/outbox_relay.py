"""Sends webhooks and e-mails even while the API is down; deletes old events."""

import dagster as dg

from control_plane.notifications import outbox as box
from control_plane.notifications.dispatch import Dispatcher
from ft_assets.platform_resource import PlatformResource

FOR_S = 20.0
"""After this long a tick starts nothing new: user code has 60 s."""


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def outbox(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Sends what is due. The API does the same while it runs; claims keep the two apart."""
    opened = platform.get()
    forgotten = box.forget(opened)
    done = Dispatcher(opened).drain(for_s=FOR_S)
    return dg.SkipReason(f"{done} done, {forgotten} old events forgotten" if done or forgotten else "nothing to send")
