"""``/v1/capability_suites``: general tasks that a job may be evaluated with."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from control_plane.api import schemas
from control_plane.api.deps import PlatformDep, Reader
from control_plane.service import capability_suites

router = APIRouter(prefix="/v1/capability_suites", tags=["evaluations"])


@router.get("")
def list_capability_suites(platform: PlatformDep, _: Reader) -> schemas.ListOf[schemas.CapabilitySuite]:
    """Names for ``eval_config.capability``; one that is not ready says why, and a job that names it is refused."""
    default = platform.settings.eval_suites
    found = capability_suites.listing(platform)
    return schemas.ListOf(data=[schemas.CapabilitySuite(**asdict(suite), default=suite.name in default) for suite in found])
