"""``/v1/capability_suites``: general tasks that jobs can be evaluated with."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from control_plane.evaluations import schemas_capabilities
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import PlatformDep, Reader
from ft_assets.evals.suites import task_files

router = APIRouter(prefix="/v1/capability_suites", tags=["evaluations"])


@router.get("", summary="List capability suites")
def list_capability_suites(platform: PlatformDep, _: Reader) -> http_schemas.ListOf[schemas_capabilities.CapabilitySuite]:
    """List the capability suites that jobs may name in `eval_config.capability`, with the reason for those that are not ready."""
    settings = platform.settings
    found = task_files.listing(settings.eval_task_dirs, settings.eval_data_dir)
    return http_schemas.ListOf(
        data=[schemas_capabilities.CapabilitySuite(**asdict(suite), default=suite.name in settings.eval_suites) for suite in found]
    )
