"""``ft admin recipes`` on the platform's machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from control_plane.jobs.recipes import operator_recipes
from control_plane.platform.context import Platform

OURS: dict[str, Any] = {
    "name": "our-tiny", "version": 1, "extends": "any-lora", "adapter": "lora", "summary": "Ours.",
    "defaults": {"rank": {"value": 8, "source": "measured on our own tickets"}},
}  # fmt: skip


def test_a_folder_is_added_on_the_platforms_machine(fresh_platform: Platform, offline: Callable[..., Any], tmp_path: Path) -> None:
    env = {"FT_DATABASE_URL": fresh_platform.settings.database_url}
    (tmp_path / "a.yaml").write_text(json.dumps([OURS]))
    (tmp_path / "b.yaml").write_text(json.dumps([OURS | {"name": "child", "extends": "our-tiny", "defaults": {}}]))
    added = offline("admin", "recipes", "add", str(tmp_path), "--json", **env).json
    assert [each["id"] for each in added] == ["our-tiny@1", "child@1"]
    assert operator_recipes.known(fresh_platform)["child"].value("rank") == 8, "inherited from a file before it"
    (tmp_path / "c.yaml").write_text("- name: [")
    assert "c.yaml cannot be read as YAML" in offline("admin", "recipes", "add", str(tmp_path / "c.yaml"), **env).err
    assert "in use" in offline("admin", "recipes", "list", **env).out
    assert "retired" in offline("admin", "recipes", "retire", "child", **env).out
