"""Implementations of ``control_plane.platform.protocols.ObjectStore``: a local directory and an S3 bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from cryptography.fernet import MultiFernet

from control_plane.platform.protocols import ObjectStore
from control_plane.platform.secrets import cipher
from control_plane.platform.settings import Settings
from core.errors import InvalidRequest
from resources.object_store.local import LocalObjectStore
from resources.object_store.tenant_keys import KEYS, TenantKeys

LOCAL_KEYS = "local"


def from_url(
    url: str, *, cold_dir: Path | None = None, cold_class: str = "", tenant_key: str = "", cipher: Callable[[], MultiFernet] | None = None,
    client_options: Mapping[str, Any] = MappingProxyType({}),
) -> ObjectStore:  # fmt: skip
    """Open the store at `url`: ``file:///directory`` or ``s3://bucket/prefix``.

    `tenant_key` encrypts new objects: in a directory :data:`LOCAL_KEYS`, with keys of its own that `cipher` encrypts; in a
    bucket the KMS key of a tenant, with ``{tenant}`` for the tenant.

    Unused objects move to `cold_dir` in a directory store, and to the storage class `cold_class` in a bucket. S3 credentials, region and
    endpoint that `client_options` do not name come from the environment, as for any AWS client (``AWS_*``).
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        if tenant_key not in ("", LOCAL_KEYS):
            raise _invalid_key(url, tenant_key, f"use {LOCAL_KEYS}")
        root = Path(unquote(parts.path))
        keys = None if cipher is None else TenantKeys(root / KEYS, cipher)
        return LocalObjectStore(root, cold=cold_dir, keys=keys, encrypts=bool(tenant_key))
    if parts.scheme == "s3" and parts.netloc:
        from resources.object_store.s3 import S3ObjectStore  # boto3 takes 0.3 s to import, and most processes are local

        if tenant_key and "{tenant}" not in tenant_key:
            raise _invalid_key(url, tenant_key, "name a KMS key per tenant, such as alias/ft-{tenant}")
        where = {"bucket": parts.netloc, "prefix": parts.path.strip("/")}
        return S3ObjectStore.connect(**where, cold_class=cold_class, kms_key=tenant_key, **client_options)
    raise InvalidRequest(f"object store {url!r} is not file:///<directory> or s3://<bucket>/<prefix>", code="invalid_object_store")


def of_settings(settings: Settings, client_options: Mapping[str, Any] = MappingProxyType({})) -> ObjectStore:
    """Open the store that `settings` name, with the keys of its tenants."""
    return from_url(
        settings.object_store, cold_dir=settings.cold_dir, cold_class=settings.cold_storage_class, tenant_key=settings.tenant_key,
        cipher=lambda: cipher(settings), client_options=client_options,
    )  # fmt: skip


def _invalid_key(url: str, tenant_key: str, fix: str) -> InvalidRequest:
    return InvalidRequest(f"FT_TENANT_KEY is {tenant_key!r} with the object store {url!r}; {fix}", code="invalid_object_store")


__all__ = ["LocalObjectStore", "from_url", "of_settings"]
