"""Packs on the machine of a Dagster step."""

from __future__ import annotations

import shutil
from pathlib import Path

from control_plane.platform.context import Platform
from control_plane.platform.transfer import download
from core import layout
from core.durable_files import mark_used, remove_unused
from core.errors import IntegrityError
from engine.data import verify_pack


def fetch_pack(platform: Platform, tenant: str, fingerprint: str) -> Path:
    """Returns the pack in this machine's cache, downloaded once and verified."""
    target = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / layout.checked_id(fingerprint)
    try:
        mark_used(target)
        verify_pack(target)
    except (FileNotFoundError, IntegrityError):  # missing or damaged on this machine
        remove_unused(target.parents[1])
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, layout.pack_prefix(tenant, fingerprint), target, last="manifest.json")
        verify_pack(target)
    return target
