"""``ft admin maintenance`` on the platform's machine."""

from __future__ import annotations

import getpass
from collections.abc import Callable
from typing import Any

from control_plane.platform.context import Platform


def test_operators_start_list_and_end_maintenance(fresh_platform: Platform, offline: Callable[..., Any]) -> None:
    env = {"FT_DATABASE_URL": fresh_platform.settings.database_url}
    started = offline("admin", "maintenance", "start", "--message", "new switches", "--stop-in", "2h", **env)
    assert "maintenance of platform: no job starts; by " in started.err
    again = offline("admin", "maintenance", "start", "--pool", "local", "--message", "a new disk", "--json", **env).json
    assert (again["scope"], again["stop_at"], again["started_by"]) == ("pool:local", None, f"cli:{getpass.getuser()}")
    listed = offline("admin", "maintenance", "list", **env).out
    assert "new switches" in listed and "pool:local" in listed and "running jobs finish" in listed
    assert offline("admin", "maintenance", "end", "--pool", "local", **env).err.startswith("maintenance of pool:local has ended")
    assert [m["scope"] for m in offline("admin", "maintenance", "list", "--json", **env).json] == ["platform"]
    refused = offline("admin", "maintenance", "end", "--pool", "local", **env)
    assert refused.code != 0 and "there is no maintenance of pool:local" in refused.out + refused.err
