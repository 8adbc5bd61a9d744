"""``ft admin signing-keys``: the keys with which the platform signs adapters and exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.adapters.tables import SigningKey
    from control_plane.platform.context import Platform

KEYS = listing({"KEY": "id", "CREATED": since("created_at"), "STATE": lambda k: "revoked" if k["revoked_at"] else "trusted"})


def register(admin: typer.Typer) -> None:
    commands = {"list": list_keys, "rotate": rotate, "revoke": revoke}
    add_group(admin, "signing-keys", commands, help="Keys that sign adapters and exports; the newest signs, earlier ones still verify.")


@local(KEYS)
def list_keys(platform: Platform) -> Any:
    """List every key that ever signed, newest first."""
    from control_plane.adapters import signing_keys

    return [_document(key) for key in signing_keys.list_keys(platform)]


@local("{id} signs from now on; earlier keys still verify what they signed")
def rotate(platform: Platform) -> Any:
    """Make a new key in the key file of this machine."""
    from control_plane.adapters import signing_keys

    return _document(signing_keys.rotate(platform))


@local("{id} is revoked; the worker signs again what it had signed")
def revoke(platform: Platform, id: Annotated[str, typer.Argument(metavar="KEY", help="Key id.")]) -> Any:
    """Trust a key no longer, e.g. because it leaked. Rotate first, so that there is a key that signs."""
    from control_plane.adapters import signing_keys

    return _document(signing_keys.revoke(platform, id))


def _document(key: SigningKey) -> Any:
    return document(key, "id", "public_key", "created_at", "revoked_at")
