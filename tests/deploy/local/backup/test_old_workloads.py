"""What still runs from the old home is told to end by the restored one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from agent import messages
from agent.messages import Heartbeat
from control_plane.attempts import agents
from control_plane.attempts.tables import agents as agents_table
from control_plane.platform.context import Platform
from control_plane.tenants.tables import console_sessions
from deploy.local.backup.home_restore import END_SESSIONS, NEW_TOKENS
from ft_assets.errors import Conflict
from resources.database.engine import make_engine
from tests.support.jobs.started_job import start_job


def test_an_agent_of_the_old_home_is_fenced_and_a_new_one_gets_a_token(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    old = agents.introduce(platform, held, may_read=[])
    agents.heartbeat(platform, old, Heartbeat(phase="train", number=1))
    engine = make_engine(platform.settings.database_url, pool_size=1, max_overflow=0)
    with engine.begin() as conn:
        conn.exec_driver_sql(NEW_TOKENS)
        conn.exec_driver_sql(END_SESSIONS)
        assert conn.scalar(sa.select(sa.func.count()).select_from(console_sessions)) == 0
    engine.dispose()
    with pytest.raises(Conflict) as refused:
        agents.heartbeat(platform, old, Heartbeat(phase="train", number=2))
    assert refused.value.code == messages.FENCED
    new = agents.introduce(platform, held, may_read=[])
    assert new != old
    agents.heartbeat(platform, new, Heartbeat(phase="train", number=2))


def test_each_attempt_gets_a_token_of_its_own_that_its_agents_share(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(fresh_platform, write_chat_rows)
    engine = make_engine(fresh_platform.settings.database_url, pool_size=1, max_overflow=0)
    second = (
        "INSERT INTO attempts SELECT (jsonb_populate_record(a, jsonb_build_object('attempt', 2))).* FROM attempts AS a WHERE job_id = :id"
    )
    with engine.begin() as conn:
        conn.execute(sa.text(second), {"id": held.job_id})
    old = {agents.introduce(fresh_platform, replace(held, attempt=number, placement=held.placement * 2), may_read=[]) for number in (1, 2)}
    with engine.begin() as conn:
        conn.exec_driver_sql(NEW_TOKENS)
        columns = agents_table.c.attempt, agents_table.c.token
        found = conn.execute(sa.select(*columns).where(agents_table.c.job_id == held.job_id)).all()
    engine.dispose()
    assert len(found) == 4
    assert len({tuple(row) for row in found}) == len({row.token for row in found}) == 2
    assert not old & {row.token for row in found}
