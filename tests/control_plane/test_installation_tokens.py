"""Tokens of an installation: made at the first use, or those of the settings."""

from __future__ import annotations

from pathlib import Path

from control_plane.installation import dagster_token
from control_plane.settings import load


def test_the_platform_calls_a_webserver_of_another_home_with_the_token_of_the_settings(tmp_path: Path) -> None:
    homes = {name: load({"FT_HOME": str(tmp_path / name), "FT_DAGSTER_TOKEN": "t" * 43}) for name in ("platform", "webserver")}
    assert {dagster_token(settings) for settings in homes.values()} == {"t" * 43}
    assert "t" * 43 not in repr(homes["platform"])
    own = [load({"FT_HOME": str(tmp_path / name)}) for name in ("platform", "webserver")]
    assert len({dagster_token(settings) for settings in own}) == 2
