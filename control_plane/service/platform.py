"""What every use case is given: the parts of one running platform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy.engine import Engine

from control_plane.protocols import Fleet, ModelRegistry, ObjectStore, Tracker
from control_plane.settings import Settings

if TYPE_CHECKING:
    from ft_assets.base_models import Catalogue


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Composed once a process by ``resources.platform.open_platform``; tests compose their own."""

    engine: Engine
    objects: ObjectStore
    models: Catalogue
    fleet: Fleet | None
    """None where nothing is served: promotion then only records the desired state."""
    settings: Settings
    clock: Callable[[], datetime] = utc_now
    """Now, with its time zone."""
    tracker: Tracker | None = None
    """None where runs are not tracked."""
    registry: ModelRegistry | None = None
    """None where adapters are not mirrored as registered models."""
