"""What still runs from the old home is told to end by the restored one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from agent import messages
from agent.messages import Heartbeat
from control_plane.attempts import agents
from control_plane.platform.context import Platform
from control_plane.tenants.tables import console_sessions
from core.errors import Conflict
from deploy.local.backup.home_restore import END_SESSIONS, END_TOKENS
from resources.database.engine import make_engine
from tests.support.jobs.started_job import start_job


def test_an_agent_of_the_old_home_is_fenced_and_a_new_one_gets_a_token(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    old = agents.introduce(platform, held, may_read=[])
    agents.heartbeat(platform, old, Heartbeat(phase="train", number=1))
    engine = make_engine(platform.settings.database_url, pool_size=1, max_overflow=0)
    with engine.begin() as conn:
        conn.exec_driver_sql(END_TOKENS)
        conn.exec_driver_sql(END_SESSIONS)
        assert conn.scalar(sa.select(sa.func.count()).select_from(console_sessions)) == 0
    engine.dispose()
    with pytest.raises(Conflict) as refused:
        agents.heartbeat(platform, old, Heartbeat(phase="train", number=2))
    assert refused.value.code == messages.FENCED
    new = agents.introduce(platform, held, may_read=[])
    assert new != old
    agents.heartbeat(platform, new, Heartbeat(phase="train", number=2))
