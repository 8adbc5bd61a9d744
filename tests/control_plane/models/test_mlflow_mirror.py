"""What the model registry is to show, and when it is told: after a change, again after a failure, and never for nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as table
from control_plane.models import mlflow_mirror
from control_plane.platform.context import Platform
from control_plane.platform.protocols import RegisteredModels
from control_plane.tenant_data import deletion_requests
from control_plane.tenants import service as tenants
from core.errors import Unavailable
from engine.adapters.record import parse_adapter_name
from tests.support.jobs.registered_adapter import add_adapter

START = datetime(2026, 5, 1, tzinfo=UTC)


@dataclass(kw_only=True)
class Registry:
    told: list[RegisteredModels] = field(default_factory=list)
    away: bool = False

    def mirror(self, models: RegisteredModels) -> int:
        if self.away:
            raise Unavailable("MLflow does not answer")
        self.told.append(models)
        return len(models.versions)


@dataclass(kw_only=True)
class Clock:
    now: datetime = START

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def add(fresh_platform: Platform) -> Callable[..., str]:
    owner, _ = tenants.create(fresh_platform, "acme", tier="standard")

    def make(stage: str, *, suffix: str = "support", day: int = 0) -> str:
        name = f"ft:org/base:{owner.id}:{suffix}:{uuid.uuid4().hex[:8]}"
        made = replace(fresh_platform, clock=lambda: START + timedelta(days=day))
        return add_adapter(made, owner.id, name=name, stage=stage, loaded=False)

    return make


def test_aliases_name_the_newest_two_in_production_and_the_newest_that_waits(fresh_platform: Platform, add: Callable[..., str]) -> None:
    oldest, before, now = (add("production", day=day) for day in (1, 2, 3))
    waiting = add("staging", day=4)
    bad, alone = add("quarantined", day=5), add("draft", suffix="", day=6)
    found = mlflow_mirror.desired(fresh_platform)
    assert found.aliases == {"acme.support.org+base": {"production": now, "previous": before, "staging": waiting}, "acme.-.org+base": {}}
    assert [v.adapter_id for v in found.versions if v.model == "acme.support.org+base"] == [oldest, before, now, waiting, bad]
    last = found.versions[-1]
    assert (last.adapter_id, last.tags["ft.stage"], len(last.tags["ft.manifest_sha256"])) == (alone, "draft", 64)
    assert last.source.startswith("file:///")


def test_adapters_made_before_a_tenants_data_was_deleted_are_left_out_and_later_ones_are_registered(
    fresh_platform: Platform, add: Callable[..., str]
) -> None:
    add("production", day=1)
    on_day_2 = replace(fresh_platform, clock=lambda: START + timedelta(days=2))
    deletion_requests.request_tenant(on_day_2, "acme", confirm="acme", reason="contract ended", requested_by="key_1")
    later = add("production", day=3)
    assert [version.adapter_id for version in mlflow_mirror.desired(fresh_platform).versions] == [later]


def test_two_lineages_never_share_a_model() -> None:
    names = ["ft:a/b:t:s:1", "ft:a.b:t:s:1", "ft:b:t:s:1", "ft:b:t::1", "ft:b:t-s::1", "ft:a+b:t:s:1"]
    assert len({mlflow_mirror.model_name(parse_adapter_name(n)) for n in names[:5]}) == 5


def test_it_is_told_after_a_change_and_not_for_nothing(fresh_platform: Platform, add: Callable[..., str]) -> None:
    registry, clock = Registry(), Clock()
    platform = replace(fresh_platform, registry=registry, clock=clock)
    assert mlflow_mirror.mirror(platform) == 0, "nothing is registered: MLflow is not started for that"
    first = add("production")
    assert mlflow_mirror.mirror(platform) == 1
    assert mlflow_mirror.mirror(platform) is None
    with platform.engine.begin() as conn:
        adapters.set_stage(conn, first, adapters.Stage.DEPRECATED)
    assert mlflow_mirror.mirror(platform) == 1
    assert registry.told[-1].aliases == {"acme.support.org+base": {}}
    clock.now += timedelta(hours=25)
    assert mlflow_mirror.mirror(platform) == 1, "once a day all is compared"


def test_a_registry_that_is_away_fails_nothing_and_is_told_later(fresh_platform: Platform, add: Callable[..., str]) -> None:
    registry, clock = Registry(away=True), Clock()
    platform = replace(fresh_platform, registry=registry, clock=clock)
    id_ = add("production")
    assert mlflow_mirror.mirror(platform) is None
    assert mlflow_mirror.problem(platform) == "MLflow does not answer"
    registry.away = False
    assert mlflow_mirror.mirror(platform) is None, "not at once"
    clock.now += timedelta(minutes=3)
    assert mlflow_mirror.mirror(platform) == 1
    assert mlflow_mirror.problem(platform) is None
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(table.c.stage).where(table.c.id == id_)).scalar() == "production"
