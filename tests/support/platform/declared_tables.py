"""The schema that the code declares: the tables of all packages."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import sqlalchemy as sa

import control_plane
from control_plane.platform.tables import metadata


def declared_tables() -> sa.MetaData:
    top = Path(control_plane.__file__).parent
    for path in sorted(top.rglob("tables.py")):
        import_module(".".join(path.relative_to(top.parent).with_suffix("").parts))
    return metadata
