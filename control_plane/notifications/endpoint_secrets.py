"""What a webhook endpoint keeps from others, encrypted in the database: its signing secrets, and its URL, which often holds a token.

Column ``url`` holds scheme, host and port alone, for the audit log and for operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from control_plane.platform.installation_secrets import seal, unseal
from control_plane.platform.settings import Settings


def sealed_url(settings: Settings, url: str) -> dict[str, Any]:
    """`url` as columns."""
    parts = urlsplit(url)
    return {"url": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", "sealed_url": seal(settings, url)}


def sealed_secrets(settings: Settings, secrets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`secrets` as a column."""
    return {"secrets": [{**s, "secret": seal(settings, s["secret"])} for s in secrets]}


def opened(settings: Settings, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of ``webhook_endpoints`` with its URL and secrets in clear."""
    secrets = [{**s, "secret": unseal(settings, s["secret"])} for s in row["secrets"]]
    url = unseal(settings, row["sealed_url"]) if row["sealed_url"] else row["url"]  # a deleted one has none
    return {**row, "url": url, "secrets": secrets}
