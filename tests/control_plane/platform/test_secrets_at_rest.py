"""What the database holds of secrets: nothing that can be read without the key file of the installation."""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from control_plane.notifications import webhook_endpoints as webhooks
from control_plane.notifications.tables import webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.secrets import _cipher_of, dagster_token, inference_token, kept_secret, seal, unseal
from control_plane.platform.settings import Settings, load
from core.errors import IntegrityError
from tests.support.platform.notified_tenants import World, forget_all
from tests.support.servers.webhook_receiver import Receiver, receiver

TOKEN_IN_URL = "T0KENxyz"


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.0/8")


@pytest.fixture
def world(platform: Platform) -> World:
    forget_all(platform)
    return World(platform)


def whole_database(platform: Platform) -> str:
    """Every row of every table as text."""
    with platform.engine.connect() as conn:
        tables = conn.execute(sa.text("SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = 'public'")).scalars().all()
        return "\n".join(str(conn.execute(sa.text(f"SELECT * FROM {table}")).mappings().all()) for table in tables)


def test_no_table_holds_a_webhook_secret_or_the_token_of_its_url(world: World, there: Receiver) -> None:
    url = there.url(f"/services/{TOKEN_IN_URL}?token={TOKEN_IN_URL}")
    made = webhooks.create(world.platform, world.tenant, name="hook", url=url, event_types=["*"])
    rotated = webhooks.rotate_secret(world.platform, world.tenant, made.endpoint.id, keep_old=True)
    moved = webhooks.update(world.platform, world.tenant, made.endpoint.id, {"url": f"{url}&again={TOKEN_IN_URL}"})
    found = whole_database(world.platform)
    assert made.endpoint.id in found, "the search would find nothing"
    assert [s for s in (TOKEN_IN_URL, made.secret, rotated.secret, made.secret.removeprefix("whsec_")) if s in found] == []
    assert moved.url == f"{url}&again={TOKEN_IN_URL}"
    assert [s.secret for s in moved.secrets] == [rotated.secret, made.secret]


def test_a_deleted_endpoint_keeps_neither_url_nor_secret(world: World, there: Receiver) -> None:
    made = webhooks.create(world.platform, world.tenant, name="hook", url=there.url(f"/{TOKEN_IN_URL}"), event_types=["*"])
    webhooks.delete(world.platform, world.tenant, made.endpoint.id)
    query = sa.select(webhook_endpoints.c.url, webhook_endpoints.c.sealed_url, webhook_endpoints.c.secrets)
    with world.platform.engine.connect() as conn:
        assert conn.execute(query.where(webhook_endpoints.c.id == made.endpoint.id)).one() == ("", "", [])


def test_deliveries_are_signed_with_the_secret_and_go_to_the_whole_url(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url(f"/ok/{TOKEN_IN_URL}"))
    world.tell()
    world.send()
    assert world.states(endpoint) == ["delivered"]
    assert there.received[0].path == f"/ok/{TOKEN_IN_URL}"


def test_a_new_key_on_top_seals_anew_and_the_old_one_still_opens(platform: Platform, tmp_path: Path) -> None:
    settings = replace(platform.settings, secrets_key_file=tmp_path / "keys")
    sealed = seal(settings, "old")
    old_key = settings.secrets_key_file.read_text()
    settings.secrets_key_file.write_text(f"{Fernet.generate_key().decode()}\n{old_key}")
    _cipher_of.cache_clear()  # as a restart
    assert unseal(settings, sealed) == "old"
    newer = seal(settings, "new")
    settings.secrets_key_file.write_text(old_key)
    _cipher_of.cache_clear()
    with pytest.raises(IntegrityError, match="restore the key file") as refused:
        unseal(settings, newer)
    assert refused.value.code == "secrets_key_mismatch"


def test_endpoints_are_listed_and_deleted_also_when_their_key_is_lost(world: World, there: Receiver) -> None:
    made = webhooks.create(world.platform, world.tenant, name="hook", url=there.url(f"/{TOKEN_IN_URL}"), event_types=["*"])
    keys = world.platform.settings.secrets_key_file
    kept = keys.read_text()
    try:
        keys.write_text(Fernet.generate_key().decode())
        _cipher_of.cache_clear()
        (row,) = webhooks.list_endpoints(world.platform, world.tenant).items
        with pytest.raises(IntegrityError, match="restore the key file"):
            webhooks.get(world.platform, world.tenant, row.id)
        webhooks.delete(world.platform, world.tenant, row.id)
    finally:
        keys.write_text(kept)
        _cipher_of.cache_clear()
    assert (row.id, row.url, row.secrets) == (made.endpoint.id, there.url("").rstrip("/"), ())


def test_secret_files_are_of_their_owner_alone(tmp_path: Path) -> None:
    settings = load({"FT_HOME": str(tmp_path)})
    old = os.umask(0)
    try:
        tokens = {inference_token(settings), dagster_token(settings), seal(settings, "x")}
    finally:
        os.umask(old)
    assert len(tokens) == 3
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {
        "inference.token": 0o600, "dagster.token": 0o600, "secrets.key": 0o600
    }  # fmt: skip
    (tmp_path / "inference.token").chmod(0o640)
    with pytest.raises(IntegrityError, match="chmod 600"):
        inference_token(settings)


def first_use(settings: Settings, out: multiprocessing.Queue[str]) -> None:
    out.put(inference_token(settings))


def test_processes_that_start_at_once_agree_on_a_token(tmp_path: Path) -> None:
    settings = load({"FT_HOME": str(tmp_path / "home")})
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    running = [context.Process(target=first_use, args=(settings, out)) for _ in range(8)]
    for process in running:
        process.start()
    found = {out.get(timeout=30) for _ in running}
    for process in running:
        process.join()
    assert found == {inference_token(settings)}


def test_of_two_processes_that_make_a_secret_both_use_the_one_that_was_there_first(tmp_path: Path) -> None:
    file = tmp_path / "secrets.key"
    assert kept_secret(file, lambda: f"late, after {kept_secret(file, lambda: 'first')}") == "first"
    assert file.read_text() == "first\n"
    assert [path.name for path in tmp_path.iterdir()] == ["secrets.key"]
