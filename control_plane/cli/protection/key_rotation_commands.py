"""``ft admin keys``: new encryption keys for secrets in the database and for tenants' objects, while everything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.record_views import add_group

if TYPE_CHECKING:
    from control_plane.platform.context import Platform


def register(admin: typer.Typer) -> None:
    add_group(admin, "keys", {"rotate": rotate, "retire": retire}, help="Encryption keys of the installation and of tenants' objects.")


def _rotated(done: Mapping[str, Any]) -> str:
    added = ", ".join(done["added"]) or "none"
    again = f"{done['num_secrets']} rows of secrets and {done['num_objects']} objects ({done['num_bytes'] / 1e6:.1f} MB)"
    lines = [
        f"new keys: {added}; encrypted again: {again}; the older ones still open everything; after 1 h, `ft admin keys retire` removes them"
    ]
    if done["continued"]:
        lines.append(
            f"no new key for {', '.join(done['continued'])}: a rotation is under way, which this continued. If one of these has leaked, "
            "run `ft admin keys retire`, then rotate again"
        )
    if done["unreadable"]:
        lines.append(f"left as they are, because no key opens them: {', '.join(done['unreadable'])}; restore them from a backup")
    return "\n".join(lines)


@local(_rotated)
def rotate(
    platform: Platform,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only this tenant's key of objects; by default, all keys and the installation's.")
    ] = None,
) -> Any:
    """Add new keys and encrypt with them what the older ones had encrypted. Nothing stops; repeat it if it was interrupted."""
    from resources import key_rotation

    return asdict(key_rotation.rotate(platform, tenant=tenant))


def _retired(removed: Mapping[str, int]) -> str:
    named = ", ".join(f"{num} of {owner}" for owner, num in removed.items())
    return f"older keys removed: {named}" if named else "there are no older keys; `ft admin keys rotate` adds new ones"


@local(_retired)
def retire(platform: Platform) -> Any:
    """Remove the older keys of a rotation, once nothing needs them. Backups made before it still need them."""
    from resources import key_rotation

    return key_rotation.retire(platform)
