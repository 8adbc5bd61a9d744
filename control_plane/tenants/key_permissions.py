"""What a key may do to other keys of its tenant: no key can grant more than it has."""

from __future__ import annotations

from datetime import datetime

from control_plane.tenants.rules import Principal, Role
from control_plane.tenants.tables import ApiKey
from core.errors import Forbidden

BELOW_ADMIN = (Role.MEMBER, Role.VIEWER)


def check_made_for(by: Principal, member_id: str, role: Role) -> None:
    """A caller who may not name owners can create keys for itself and for members below it; an owner for all members."""
    if not by.may_name_owners and member_id != by.member_id and role not in BELOW_ADMIN:
        raise _owner_required(f"makes a key that acts as the {role} {member_id}")


def check_rotation(by: Principal, key: ApiKey) -> None:
    """A member's secret is shown to that member only; one of the tenant itself to callers who may name owners."""
    if key.id == by.id:
        return
    if key.member_id is not None and key.member_id != by.member_id:
        raise Forbidden(
            f"the key {key.id} belongs to another member, and only they can rotate it; revoke it with DELETE /v1/api_keys/{key.id}",
            code="key_of_another_member",
        )
    if key.names_owners and not by.may_name_owners:
        raise _owner_required(f"rotates {key.id}, a key of the tenant itself")


def check_revocation(by: Principal, key: ApiKey, role: Role | None) -> None:
    """`role`: role of the member who owns the key."""
    if by.may_name_owners or key.id == by.id:
        return
    if key.names_owners or role is Role.OWNER:
        raise _owner_required(f"revokes {key.id}, a key {'of an owner' if role else 'of the tenant itself'}")


def rate_within(by: Principal, requested: int | None) -> int | None:
    """Return the request limit of a key created by `by`: a key below the tenant's limit grants no more than its own."""
    own = by.requests_per_minute
    if own >= by.tenant.requests_per_minute:
        return requested
    if requested is not None and requested > own:
        raise _wider(f"requests_per_minute {requested} is more than the {own} of the key {by.id} that asks", "requests_per_minute")
    return own if requested is None else requested


def end_within(requested: datetime | None, bound: datetime | None) -> datetime | None:
    """Return the expiry of a key whose creator expires at `bound`; the same time if none is requested."""
    if bound is None or requested is None:
        return bound or requested
    if requested > bound:
        raise _wider(
            f"the new key would open until {requested:%Y-%m-%d %H:%M} UTC, yours may give until {bound:%Y-%m-%d %H:%M}", "expires_in"
        )
    return requested


def check_as_wide(by: Principal, key: ApiKey) -> None:
    """Refuse to hand the secret of a `key` to a key that expires earlier, or has a lower request limit."""
    if by.expires_at is not None and (key.expires_at is None or key.expires_at > by.expires_at):
        raise _wider(f"the key {key.id} would stay valid longer than {by.id}, which requests it", None)
    if rate_within(by, key.requests_per_minute) != key.requests_per_minute:
        raise _wider(f"the key {key.id} would have a higher request limit than {by.id}, which requests it", None)


def _owner_required(what: str) -> Forbidden:
    return Forbidden(f"only an owner {what}; use an owner's key, or one of the tenant's own that an owner made", code="owner_required")


def _wider(what: str, param: str | None) -> Forbidden:
    return Forbidden(f"{what}; ask for less, or use a key without that limit", code="wider_than_your_key", param=param)
