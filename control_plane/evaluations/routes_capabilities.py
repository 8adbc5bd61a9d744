"""``/v1/capability_suites``: general tasks that a job may be evaluated with."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from control_plane.evaluations import capability_suites, schemas_capabilities
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader

router = APIRouter(prefix="/v1/capability_suites", tags=["evaluations"])


@router.get("")
def list_capability_suites(platform: PlatformDep, _: Reader) -> http_schemas.ListOf[schemas_capabilities.CapabilitySuite]:
    """Names for ``eval_config.capability``; one that is not ready says why, and a job that names it is refused."""
    default = platform.settings.eval_suites
    found = capability_suites.listing(platform)
    return http_schemas.ListOf(
        data=[schemas_capabilities.CapabilitySuite(**asdict(suite), default=suite.name in default) for suite in found]
    )
