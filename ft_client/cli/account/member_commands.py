"""``ft members``: people of your tenant, and their roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.output import say
from ft_client.cli.record_views import NewName, add_group, given, listing, since
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

MemberId = Annotated[str, typer.Argument(metavar="MEMBER_ID", help="Member id (`ft members` lists them): mem_...")]
Role = Annotated[str | None, typer.Option("--role", help="owner, admin, member or viewer.")]
MEMBERS = listing({
    "ID": "id", "E-MAIL": "email", "NAME": "name", "ROLE": lambda m: "removed" if m["removed_at"] else m["role"],
    "SINCE": since("created_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    commands = {"list": list_members, "add": add, "update": update, "remove": remove}
    add_group(app, "members", commands, help="List the people of your tenant, add and remove them.", panel="Account")


def _show(member: Record) -> None:
    print(member["id"])
    say(f"{member['email']} is {member['role']}; e-mail is {'sent' if member['notify'] else 'not sent'}")


@remote(MEMBERS)
def list_members(client: FtClient, everybody: Annotated[bool, typer.Option("--all", help="Include removed members.")] = False) -> Any:
    """List the people of your tenant, newest first."""
    return client.members.list(removed=everybody).all()


@remote(_show)
def add(client: FtClient, email: Annotated[str, typer.Argument(metavar="E-MAIL")], role: Role = "member", name: NewName = None) -> Any:
    """Add a person; `ft keys create NAME --member ID` creates a key for them."""
    return client.members.create(email=email, role=role, **given(name=name))


@remote(_show)
def update(
    client: FtClient,
    member_id: MemberId,
    role: Role = None,
    name: NewName = None,
    notify: Annotated[bool | None, typer.Option("--notify/--no-notify", help="Send e-mail to this person.")] = None,
) -> Any:
    """Change a person's role, name, or e-mail notifications."""
    return client.members.update(member_id, **given(role=role, name=name, notify=notify))


@remote("{member_id} is removed; keys revoked with it: {revoked_keys}")
def remove(client: FtClient, member_id: MemberId) -> Any:
    """Remove a person and revoke their keys."""
    return client.members.remove(member_id)
