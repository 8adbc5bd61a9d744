"""The platform of this machine, for commands that use its database rather than the API."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from core.errors import InvalidRequest, Unavailable
from ft_client.cli.commands import Commands

if TYPE_CHECKING:
    from control_plane.platform.context import Platform
    from control_plane.platform.settings import Settings


@contextmanager
def open_local() -> Iterator[Platform]:
    """Open the platform of this home. The first query connects, so wrong arguments are reported even if the database is not running.

    The audit log names the machine's user as the actor. At the end, connections are closed and the umask is restored.
    """
    from sqlalchemy.exc import OperationalError

    from control_plane.composition import open_platform
    from control_plane.platform.context import Actor
    from deploy.local.lifecycle import load_settings
    from deploy.local.postgres import postmaster_pid
    from deploy.local.private_home import UMASK, check_owner

    settings = load_settings()
    down = f"the embedded database in {settings.home} is not running; start it with `ft up`, or set FT_DATABASE_URL"
    if settings.embedded_database and not settings.home.is_dir():  # opening a platform writes to its home
        raise Unavailable(down, code="stack_down")
    if settings.embedded_database:
        check_owner(settings.home)
    _refuse_another_store(settings)
    with ExitStack() as at_the_end:
        at_the_end.callback(os.umask, os.umask(UMASK))  # what is written is for its owner alone
        platform = open_platform(settings)
        at_the_end.callback(platform.logins.dispose)
        try:
            yield platform.acting_as(Actor(kind="operator", id=user()))
        except OperationalError as e:
            if settings.embedded_database and postmaster_pid(settings) is None:
                raise Unavailable(down, code="stack_down") from e
            raise Unavailable(f"the database does not answer: {e.orig}; check FT_DATABASE_URL", code="database_unreachable") from e


def _refuse_another_store(settings: Settings) -> None:
    """Refuse to work on other objects than those of the stack that runs in this home: it was started in another shell."""
    try:
        running = json.loads(settings.endpoints_file.read_text())
    except (OSError, ValueError):
        return
    for variable, here in settings.where_objects_are().items():
        if (there := running.get(variable, here)) != here:
            raise InvalidRequest(
                f"the stack in {settings.home} runs with {variable}={there}, and this command with {variable}={here}; set it as for "
                "`ft up`",
                code="settings_differ",
            )


def user() -> str:
    """Return the machine's user, as records of changes name them."""
    return f"cli:{getpass.getuser()}"


@contextmanager
def _settings() -> Iterator[Settings]:
    from control_plane.platform.settings import load

    yield load()


local = Commands(opened=open_local)
"""Makes commands of functions that take the platform first."""
with_settings = Commands(opened=_settings)
"""Makes commands of functions that take the settings first, and work without a database."""
