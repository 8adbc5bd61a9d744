"""Tokens of an installation: made at the first use, or those of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.platform.secrets import dagster_token, seal, unseal
from control_plane.platform.settings import load
from tests.support.processes.fsync_calls import Synced


def test_the_platform_calls_a_webserver_of_another_home_with_the_token_of_the_settings(tmp_path: Path) -> None:
    homes = {name: load({"FT_HOME": str(tmp_path / name), "FT_DAGSTER_TOKEN": "t" * 43}) for name in ("platform", "webserver")}
    assert {dagster_token(settings) for settings in homes.values()} == {"t" * 43}
    assert "t" * 43 not in repr(homes["platform"])
    own = [load({"FT_HOME": str(tmp_path / name)}) for name in ("platform", "webserver")]
    assert len({dagster_token(settings) for settings in own}) == 2


def test_a_new_key_file_and_its_name_are_on_the_disk_before_anything_is_sealed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load({"FT_HOME": str(tmp_path / "home")})
    synced, named = Synced(monkeypatch), []
    synced.after = lambda path: named.append(settings.secrets_key_file.exists())
    sealed = seal(settings, "whsec_1")
    content, directory = synced.paths
    assert content.parent == directory == settings.secrets_key_file.parent
    assert named == [False, True], "the content before the name, and then the name"
    assert unseal(settings, sealed) == "whsec_1" and len(synced.paths) == 2, "a key is made once"
