"""``ft admin audit export`` and ``verify``, which needs no database for a file."""

from __future__ import annotations

from pathlib import Path

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.ft_client.cli.conftest import Ft


def test_an_export_is_verified_offline_and_an_edit_is_named(offline: Ft, fresh_platform: Platform, tmp_path: Path) -> None:
    env = {"FT_DATABASE_URL": fresh_platform.settings.database_url, "FT_HOME": str(fresh_platform.settings.home)}
    tenants.create(fresh_platform, "t-audited")
    file = tmp_path / "audit.jsonl"
    written = offline("admin", "audit", "export", file, "--json", **env).json
    assert written["findings"] == []
    assert offline("admin", "audit", "verify", "--head", written["head"], "--json", **env).json == written
    assert offline("admin", "audit", "verify", file, "--json").json == written
    assert offline("admin", "audit", "--tenant", "t-audited", "--json", **env).json[0]["tenant_id"] == "t-audited", "as before"
    assert "exists; name a new file" in offline("admin", "audit", "export", file, **env).err

    file.write_text(file.read_text().replace("t-audited", "t-another", 1))
    edited = offline("admin", "audit", "verify", file)
    assert edited.code == 1
    assert "(position 1) was altered" in edited.err
    assert "is not POSITION:SHA256" in offline("admin", "audit", "verify", file, "--head", "1").err
