"""A restored key file is the one that encrypted the restored objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.platform.secrets import cipher
from control_plane.platform.settings import load
from core.errors import IntegrityError
from deploy.local.backup import home_restore
from resources.object_store.tenant_keys import KEYS, TenantKeys


def test_a_key_file_of_another_installation_is_refused(tmp_path: Path) -> None:
    settings = load({"FT_HOME": str(tmp_path / "home")})
    root = tmp_path / "objects"
    TenantKeys(root / KEYS, lambda: cipher(settings)).new_data_key("tenants/acme/x")
    home_restore._check_keys(settings, root)
    other = load({"FT_HOME": str(tmp_path / "other")})
    with pytest.raises(IntegrityError, match=r"does not decrypt .*\.keys/acme; restore the key file that belongs to it"):
        home_restore._check_keys(other, root)
