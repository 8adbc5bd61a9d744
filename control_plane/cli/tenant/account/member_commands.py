"""``ft members``: people of your tenant, and their roles."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from control_plane.cli.output import Json, ago, print_json, say, table

MemberId = Annotated[str, typer.Argument(metavar="MEMBER_ID", help="Member id (`ft members` lists them): mem_...")]
Role = Annotated[str | None, typer.Option("--role", help="owner, admin, member or viewer.")]


def register(app: typer.Typer) -> None:
    members = typer.Typer(help="List the people of your tenant, add and remove them.", no_args_is_help=True)
    members.command("list")(list_members)
    for command in (add, update, remove):
        members.command()(command)
    app.add_typer(members, name="members", rich_help_panel="Account")


def list_members(
    everybody: Annotated[bool, typer.Option("--all", help="Include removed members.")] = False,
    as_json: Json = False,
) -> None:
    """List the people of your tenant, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.members.list(removed=everybody).all()
    if as_json:
        print_json(found)
        return
    rows = [(m["id"], m["email"], m["name"], "removed" if m["removed_at"] else m["role"], ago(m["created_at"])) for m in found]
    table(("ID", "E-MAIL", "NAME", "ROLE", "SINCE"), rows)


def add(
    email: Annotated[str, typer.Argument(metavar="E-MAIL")],
    role: Role = "member",
    name: Annotated[str | None, typer.Option("--name")] = None,
    as_json: Json = False,
) -> None:
    """Add a person; `ft keys create NAME --member ID` creates a key for them."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        made = client.members.create(email=email, role=role, **({"name": name} if name else {}))
    _show(made, as_json=as_json)


def update(
    member_id: MemberId,
    role: Role = None,
    name: Annotated[str | None, typer.Option("--name")] = None,
    notify: Annotated[bool | None, typer.Option("--notify/--no-notify", help="Send e-mail to this person.")] = None,
    as_json: Json = False,
) -> None:
    """Change a person's role, name, or e-mail notifications."""
    from control_plane.cli.tenant.remote import connect

    requested = {k: v for k, v in (("role", role), ("name", name), ("notify", notify)) if v is not None}
    with connect() as client:
        _show(client.members.update(member_id, **requested), as_json=as_json)


def remove(member_id: MemberId, as_json: Json = False) -> None:
    """Remove a person and revoke their keys."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.members.remove(member_id)
    if as_json:
        print_json(done)
    else:
        say(f"{member_id} is removed; keys revoked with it: {done['revoked_keys']}")


def _show(member: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(member)
        return
    print(member["id"])
    say(f"{member['email']} is {member['role']}; e-mail is {'sent' if member['notify'] else 'not sent'}")
