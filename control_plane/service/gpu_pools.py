"""The GPU pools of this installation."""

from __future__ import annotations

from control_plane.pools import Pool, local_pool
from control_plane.service.platform import Platform


def pools(platform: Platform) -> list[Pool]:
    """Pools of this installation."""
    return [local_pool(platform.settings.local_gpus, premium=platform.settings.premium_gpus)]
