"""A person's approval: who decided, when, and that nothing is promoted without."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as table
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, FtError, InvalidRequest
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def waiting(platform: Platform, tenant: Tenant) -> Callable[..., str]:
    """Makes an adapter that waits for a person, as the end of its job leaves it."""

    def make(stage: str = "staging", approval: str = "pending") -> str:
        id_ = add_adapter(platform, tenant.id, name=f"ft:b:{tenant.id}:s:{uuid.uuid4().hex[:8]}", stage=stage, loaded=False)
        with platform.engine.begin() as conn:
            conn.execute(sa.update(table).where(table.c.id == id_).values(approval=approval))
        return id_

    return make


def refused(call: Callable[[], Any]) -> FtError:
    with pytest.raises(FtError) as caught:
        call()
    return caught.value


def test_whoever_approves_is_kept_with_time_and_note_and_approving_again_changes_nothing(
    platform: Platform, tenant: Tenant, waiting: Callable[..., str]
) -> None:
    id_ = waiting()
    assert [a.id for a in adapters.list_adapters(platform, tenant.id, approval="pending").items] == [id_]
    first = promotions.approve(platform, tenant.id, id_, by="key_b", note="looked at 20 answers")
    assert (first.approval, first.approved_by, first.approval_note, first.stage) == (
        "approved", "key_b", "looked at 20 answers", "staging",
    )  # fmt: skip
    again = promotions.approve(platform, tenant.id, id_, by="key_c")
    assert (again.approved_by, again.approved_at) == ("key_b", first.approved_at)
    assert adapters.list_adapters(platform, tenant.id, approval="pending").items == []


def test_a_rejected_adapter_can_be_approved_later_and_the_last_decision_stands(
    platform: Platform, tenant: Tenant, waiting: Callable[..., str]
) -> None:
    id_ = waiting()
    assert promotions.reject(platform, tenant.id, id_, by="key_a", note="rude").approval == "rejected"
    made = promotions.approve(platform, tenant.id, id_, by="key_b")
    assert (made.approval, made.approved_by, made.approval_note) == ("approved", "key_b", None)


def test_what_needs_no_approval_cannot_be_decided_about(platform: Platform, tenant: Tenant, waiting: Callable[..., str]) -> None:
    id_ = waiting("draft", "none")
    error = refused(lambda: promotions.approve(platform, tenant.id, id_, by="k"))
    assert isinstance(error, Conflict)
    assert error.code == "approval_not_asked_for"


def test_an_adapter_in_production_is_not_rejected_under_its_callers(
    platform: Platform, tenant: Tenant, waiting: Callable[..., str]
) -> None:
    id_ = waiting()
    promotions.approve(platform, tenant.id, id_, by="k")
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == id_).values(stage="production", promoted_at=platform.clock()))
    assert "roll it back or deprecate it" in refused(lambda: promotions.reject(platform, tenant.id, id_, by="k")).message


@pytest.mark.parametrize("approval", ["pending", "rejected"])
def test_the_registry_itself_moves_nothing_to_production_that_nobody_approved(
    platform: Platform, tenant: Tenant, waiting: Callable[..., str], approval: str
) -> None:
    id_ = waiting()
    if approval == "rejected":
        promotions.reject(platform, tenant.id, id_, by="k")

    def promote() -> None:
        with platform.engine.begin() as conn:
            adapters.set_stage(conn, id_, adapters.Stage.PRODUCTION, promoted_at=platform.clock())

    assert refused(promote).code == "needs_approval"


def test_a_note_has_its_limit(platform: Platform, tenant: Tenant, waiting: Callable[..., str]) -> None:
    id_ = waiting()
    with pytest.raises(InvalidRequest, match="2001 characters"):
        promotions.reject(platform, tenant.id, id_, by="k", note="x" * 2001)
