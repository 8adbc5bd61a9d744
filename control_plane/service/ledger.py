"""The ledger's one door: an entry with both of its sides, once, however often it is reported."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.billing import Entry, postings
from control_plane.tables import ledger_entries, ledger_postings


def post(conn: Connection, tenant: str, entry: Entry, *, now: datetime) -> bool:
    """Enter `entry` with its postings; False where the ledger has it already, and nothing changes."""
    values = {**asdict(entry), "tenant_id": tenant, "created_at": now}
    new = insert(ledger_entries).values(values).on_conflict_do_nothing(index_elements=["id"]).returning(ledger_entries.c.id)
    if conn.execute(new).scalar() is None:
        return False
    sides = [
        {"entry_id": entry.id, "tenant_id": tenant, "account": account, "amount_micros": amount}
        for account, amount in postings(tenant, entry).items()
    ]
    conn.execute(sa.insert(ledger_postings), sides)
    return True
