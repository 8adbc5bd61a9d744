"""Files of jobs on the machine of a Dagster step: its copy of packs, and the directory of a job."""

from __future__ import annotations

import shutil
from pathlib import Path

from control_plane.platform.context import Platform
from control_plane.platform.transfer import download
from ft_assets import layout
from ft_assets.datasets.packs.build import verify as verify_pack
from ft_assets.errors import IntegrityError


def job_dir(platform: Platform, job_id: str) -> Path:
    """Return the job's directory on this machine, shared by its attempts here."""
    return platform.settings.work_dir / "jobs" / layout.checked_id(job_id)


def fetch_pack(platform: Platform, tenant: str, fingerprint: str) -> Path:
    """Return the pack in this machine's cache, downloaded once and verified."""
    target = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / layout.checked_id(fingerprint)
    try:
        verify_pack(target)
    except IntegrityError:  # missing or damaged on this machine
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, layout.pack_prefix(tenant, fingerprint), target, last="manifest.json")
        verify_pack(target)
    return target
