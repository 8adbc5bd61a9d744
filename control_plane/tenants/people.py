"""Who a member is: a name and an e-mail address, both as something can be sent to."""

from __future__ import annotations

import re
import uuid
from datetime import datetime
from typing import Any

from control_plane.tenants.rules import Role
from ft_assets.errors import InvalidRequest
from ft_assets.storable_text import check_storable

MAX_NAME_CHARS = 100
MAX_EMAIL_CHARS = 254
"""What a mail server takes (RFC 5321)."""
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
EMAIL = re.compile(rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@(?:{LABEL}\.)+{LABEL}")
"""As browsers check it, with a dot in the domain; whether anybody reads it shows when something is sent."""


def person_of(tenant: str, email: str, role: Role, *, now: datetime, name: str | None = None) -> dict[str, Any]:
    """The row of a new member."""
    if len(email) > MAX_EMAIL_CHARS or not EMAIL.fullmatch(email):
        raise InvalidRequest(
            f"{email[:80]!r} is no e-mail address of the form name@example.com, in ASCII, at most {MAX_EMAIL_CHARS} characters",
            code="invalid_email",
            param="email",
        )
    check_name(name)
    made = {"id": f"mem_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "email": email, "name": name or email[:MAX_NAME_CHARS]}
    return {**made, "role": role.value, "created_at": now}


def check_name(name: str | None) -> None:
    """Refuse what cannot stand in a line of a list or of a mail's header."""
    if name is None:
        return
    check_storable(name, "name")
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"name is {name[:60]!r}; 1 to {MAX_NAME_CHARS} printable characters on one line are allowed", param="name")
