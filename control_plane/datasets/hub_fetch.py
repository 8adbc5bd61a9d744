"""Fetches an import: a child process downloads and joins its shards, and the result is stored like an upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control_plane.datasets.receiver import receive
from control_plane.datasets.tables import File
from control_plane.platform.context import Platform
from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_parent import Limits, run_sandboxed
from control_plane.tenants.rules import tier_named
from control_plane.tenants.service import get as get_tenant
from core.layout import file_key, shown_filename
from engine.data import PassProgress

FETCHER = "control_plane.sandbox.task_fetch"
WALL_S = 7 * 3600.0
"""Six hours for 10 GB at half a megabyte per second, and one to join its shards."""
NETWORK = (
    *(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "ALL", "NO")),
    *(f"{name}_proxy" for name in ("http", "https", "all", "no")),
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
"""Environment variables that configure this machine's network access."""


def is_fetched(file: File) -> bool:
    """Whether the bytes of `file` are stored; those of an upload always are."""
    return bool(file.sha256)


def fetched(platform: Platform, file: File, *, hub_token: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:
    """Fetch and store the bytes of an import; returns the values for its row."""
    assert file.source is not None, "only an import is fetched"
    tenant = file.tenant_id
    tier = tier_named(get_tenant(platform, tenant).tier)
    with scratch.directory(platform.settings.work_dir, tenant) as directory:
        order = {
            "hub_id": file.source, "endpoint": platform.settings.hub_endpoint, "max_bytes": tier.max_file_bytes,
            "target": str(directory / "fetched"),
        }  # fmt: skip
        limits = Limits(wall_s=WALL_S, memory_bytes=platform.settings.validation_memory_bytes)
        made = run_sandboxed(
            FETCHER, order, directory, limits=limits, what=file.source, progress=progress, secret=hub_token, environment=NETWORK
        )
        name = shown_filename(made["filename"])
        key = file_key(tenant, file.id, name)
        with Path(made["path"]).open("rb") as stream:
            received = receive(platform.objects, key, stream, tier)
    return {"filename": name, "object_key": key, "bytes": received.num_bytes, "sha256": received.sha256.hexdigest()}
