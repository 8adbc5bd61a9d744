"""Implementations of ``control_plane.platform.protocols.ObjectStore``: a local directory and an S3 bucket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from control_plane.platform.protocols import ObjectStore
from ft_assets.errors import InvalidRequest
from resources.object_store.local import LocalObjectStore


def from_url(
    url: str, *, cold_dir: Path | None = None, cold_class: str = "", client_options: Mapping[str, Any] = MappingProxyType({})
) -> ObjectStore:
    """Open the store at `url`: ``file:///directory`` or ``s3://bucket/prefix``.

    Unused objects move to `cold_dir` in a directory store, and to the storage class `cold_class` in a bucket. S3 credentials, region and
    endpoint that `client_options` do not name come from the environment, as for any AWS client (``AWS_*``).
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalObjectStore(Path(unquote(parts.path)), cold=cold_dir)
    if parts.scheme == "s3" and parts.netloc:
        from resources.object_store.s3 import S3ObjectStore  # boto3 takes 0.3 s to import, and most processes are local

        return S3ObjectStore.connect(bucket=parts.netloc, prefix=parts.path.strip("/"), cold_class=cold_class, **client_options)
    raise InvalidRequest(f"object store {url!r} is not file:///<directory> or s3://<bucket>/<prefix>", code="invalid_object_store")


__all__ = ["LocalObjectStore", "from_url"]
