"""Keys are exchanged while objects and secrets are read and written, and the old ones are gone at the end."""

from __future__ import annotations

import dataclasses
import io
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from control_plane.datasets import validation_tasks
from control_plane.datasets.tables import File, files
from control_plane.notifications import webhook_endpoints as webhooks
from control_plane.notifications.signatures import opened, sealed_secrets, sealed_url
from control_plane.notifications.tables import SigningSecret, webhook_endpoints
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.secrets import cipher, keys_in, unseal
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from control_plane.tracking import service as tracking
from control_plane.tracking.tables import integrations
from core.encrypted_files import ENVELOPE_BYTES, MARK, encrypt
from core.errors import Conflict, IntegrityError, InvalidRequest
from resources import key_rotation
from resources.object_store import LOCAL_KEYS, from_url, object_links
from resources.object_store.local import LocalObjectStore, Renewed
from resources.object_store.tenant_keys import KEYS, TenantKeys
from resources.tracking.wandb_server import HttpWandb
from tests.support.jobs.metered_job import metered_job

TEXT = os.urandom(3 << 20)
"""Three chunks."""


@pytest.fixture
def encrypted(new_platform: Callable[..., Platform]) -> Platform:
    plain = new_platform(tenant_key=LOCAL_KEYS)
    return dataclasses.replace(plain, objects=store_of(plain))


def store_of(platform: Platform) -> LocalObjectStore:
    """A store as another process opens it."""
    opened = from_url(platform.settings.object_store, tenant_key=LOCAL_KEYS, cipher=lambda: cipher(platform.settings))
    assert isinstance(opened, LocalObjectStore)
    return opened


def aged(platform: Platform) -> None:
    """The keys were added two hours ago."""
    keys = platform.settings.home / "objects" / KEYS
    for file in (platform.settings.secrets_key_file, *keys.glob("*")):
        os.utime(file, (file.stat().st_mtime - 7200,) * 2)


def endpoint(platform: Platform, tenant: str) -> str:
    made = {"id": f"we_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "name": "h", "state": "enabled", "event_types": ["*"]}
    rest = sealed_url(platform.settings, "https://example.com/hook?token=x")
    rest = {**rest, **sealed_secrets(platform.settings, SigningSecret(secret="whsec_AAAA"))}
    now = platform.clock()
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(webhook_endpoints).values(**made, **rest, created_at=now, updated_at=now))
    return str(made["id"])


def test_all_keys_are_exchanged_while_another_process_reads_and_writes(encrypted: Platform, tmp_path: Path) -> None:
    platform, other = encrypted, store_of(encrypted)
    tenant, _ = tenants.create(platform, "t-rotating")
    made = endpoint(platform, tenant.id)
    wandb = HttpWandb(url=platform.settings.wandb_url)  # nothing is sent
    tracking.set_wandb(dataclasses.replace(platform, wandb=wandb), tenant.id, api_key="k" * 40)
    for key in ("tenants/t-rotating/a", "tenants/b/x", "suites/s"):
        platform.objects.put_bytes(key, TEXT)
    granted = platform.objects.begin_upload("tenants/b/granted", ["0" * 64])
    before = keys_in(platform.settings.secrets_key_file)
    wrapped = {owner: keys_in(platform.objects.tenant_keys.file(owner)) for owner in platform.objects.tenant_keys.owners()}  # type: ignore[attr-defined]

    done = key_rotation.rotate(platform)
    assert done.added == ("secrets.key", ".installation", "b", "t-rotating")
    assert (done.num_secrets, done.num_objects) == (2, 3)
    again = key_rotation.rotate(platform)
    assert (again.added, again.num_secrets, again.num_objects) == ((), 0, 0), "there is nothing left to do"
    assert (done.continued, again.continued) == ((), done.added), "who rotates after a leak has to know that nothing was exchanged"
    assert {other.get_bytes(key) for key in ("tenants/t-rotating/a", "tenants/b/x", "suites/s")} == {TEXT}
    other.put_bytes("tenants/b/later", TEXT)
    write_granted(platform, granted.parts[0].url)
    with pytest.raises(Conflict, match="s old, and a write with the one before may still be under way"):
        key_rotation.retire(platform)
    aged(platform)
    assert key_rotation.retire(platform) == {"secrets.key": 1, ".installation": 1, "b": 1, "t-rotating": 1}
    assert key_rotation.retire(platform) == {}

    assert before[0] not in platform.settings.secrets_key_file.read_text()
    old = cipher_of(before)
    stale = [old.decrypt(line) for lines in wrapped.values() for line in lines]
    for reader in (platform.objects, other, store_of(platform)):
        keys = ("tenants/t-rotating/a", "tenants/b/x", "suites/s", "tenants/b/later", "tenants/b/granted")
        assert {reader.get_bytes(key) for key in keys} == {TEXT}
    for file in (platform.settings.home / "objects/tenants").rglob("*"):
        assert not file.is_file() or not any(opens(Fernet(key), file) for key in stale), "no old key opens an object"
    with platform.engine.connect() as conn:
        sealed = conn.scalar(sa.select(integrations.c.sealed_key).where(integrations.c.tenant_id == tenant.id))
        found = opened(platform.settings, webhooks.locked(conn, tenant.id, made))
    assert unseal(platform.settings, sealed) == "k" * 40
    assert (found.url, found.secrets[0].secret) == ("https://example.com/hook?token=x", "whsec_AAAA")


def cipher_of(lines: list[str]) -> Fernet:
    return Fernet(lines[0])


def opens(key: Fernet, file: Path) -> bool:
    from cryptography.fernet import InvalidToken

    from core.encrypted_files import envelope_of

    with file.open("rb") as stream:
        envelope = envelope_of(stream)
    assert envelope is not None
    try:
        key.decrypt(envelope)
    except InvalidToken:
        return False
    return True


def write_granted(platform: Platform, url: str) -> None:
    """What an agent does with a key that it was granted before the rotation."""
    from core.encrypted_files import key_in

    target = platform.settings.home / "objects/tenants/b/granted"
    granted = key_in(url)
    assert granted is not None
    (target.parent / "source").write_bytes(TEXT)
    with (target.parent / "source").open("rb") as source, target.open("xb") as out:
        encrypt(source, out, granted)
    (target.parent / "source").unlink()


def test_one_tenants_key_is_exchanged_alone(encrypted: Platform) -> None:
    for tenant in "ab":
        encrypted.objects.put_bytes(f"tenants/{tenant}/x", TEXT)
    others = (encrypted.settings.home / "objects/tenants/b/x").read_bytes()
    assert key_rotation.rotate(encrypted, tenant="a").added == ("a",)
    assert (encrypted.settings.home / "objects/tenants/b/x").read_bytes() == others
    with pytest.raises(InvalidRequest, match="has no key in the object store"):
        key_rotation.rotate(encrypted, tenant="nobody")


def test_an_interrupted_rotation_continues_and_adds_no_third_key(encrypted: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("tenants/a/x", "tenants/a/y"):
        encrypted.objects.put_bytes(key, TEXT)
    whole = Path.open
    with monkeypatch.context() as broken:

        def fails(self: Path, *args: object, **options: object) -> object:
            if self.name == "y":
                raise OSError("input/output error")
            return whole(self, *args, **options)  # type: ignore[call-overload]

        broken.setattr(Path, "open", fails)
        with pytest.raises(OSError, match="input/output error"):
            key_rotation.rotate(encrypted)
    assert encrypted.objects.get_bytes("tenants/a/y") == TEXT
    continued = key_rotation.rotate(encrypted)
    assert (continued.added, continued.num_objects) == ((), 1)
    assert len(keys_in(encrypted.settings.secrets_key_file)) == 2


def test_an_object_that_is_deleted_meanwhile_stays_deleted(encrypted: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    store = encrypted.objects
    assert isinstance(store, LocalObjectStore)
    newer = store.tenant_keys.newer_envelope  # type: ignore[union-attr]

    def deleted_then(key: str, envelope: bytes) -> bytes | None:
        store.delete(key)
        return newer(key, envelope)

    store.tenant_keys.add("a")  # type: ignore[union-attr]
    monkeypatch.setattr(store.tenant_keys, "newer_envelope", deleted_then)
    assert store.renew_envelopes("") == Renewed(num_objects=0, num_bytes=0, unreadable=())
    assert not store.exists("tenants/a/x")
    assert not list((store.root / ".staging").iterdir())


def test_an_old_key_that_was_removed_by_hand_is_an_error_that_names_the_file(encrypted: Platform) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    encrypted.settings.secrets_key_file.write_text(Fernet.generate_key().decode())
    with pytest.raises(IntegrityError, match="restore the key file that belongs to it"):
        store_of(encrypted).get_bytes("tenants/a/x")


def test_keys_of_a_rotation_that_stopped_before_the_tenants_are_retired_without_loss(
    encrypted: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    with monkeypatch.context() as broken:

        def fails(*_: object, **__: object) -> object:
            raise OSError("no space left on device")

        broken.setattr(TenantKeys, "wrap_again", fails)
        with pytest.raises(OSError, match="no space left"):
            key_rotation.rotate(encrypted)
    aged(encrypted)
    assert key_rotation.retire(encrypted) == {"secrets.key": 1}
    assert store_of(encrypted).get_bytes("tenants/a/x") == TEXT


def test_keys_are_kept_until_the_newest_of_them_is_old_enough(encrypted: Platform) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    key_rotation.rotate(encrypted)
    os.utime(encrypted.settings.secrets_key_file, (time.time() - 7200,) * 2)
    with pytest.raises(Conflict, match="retire it in"):
        key_rotation.retire(encrypted)
    assert len(keys_in(encrypted.settings.secrets_key_file)) == 2


def test_keys_are_kept_while_a_workload_that_was_granted_one_runs(encrypted: Platform) -> None:
    job = metered_job(encrypted)
    key_rotation.rotate(encrypted)
    aged(encrypted)
    now = encrypted.clock()
    held = {"job_id": job.id, "pool": "local", "num_gpus": 1}
    with encrypted.engine.begin() as conn:
        conn.execute(sa.insert(reservations).values(**held, attempt=1, granted_at=now - timedelta(hours=3)))
    with pytest.raises(Conflict, match=f"a workload of job {job.id} started before the newest key"):
        key_rotation.retire(encrypted)
    with encrypted.engine.begin() as conn:
        conn.execute(sa.update(reservations).values(released_at=now))
        conn.execute(sa.insert(reservations).values(**held, attempt=2, granted_at=now - timedelta(hours=1)))
    assert key_rotation.retire(encrypted) == {"secrets.key": 1}, "the one that runs was granted the newest key"


def test_keys_are_kept_while_an_import_waits_with_a_token(encrypted: Platform) -> None:
    job = metered_job(encrypted)
    key_rotation.rotate(encrypted)
    aged(encrypted)
    with encrypted.engine.begin() as conn:
        file = records.one(conn, sa.select(files).where(files.c.tenant_id == job.tenant), File)
        validation_tasks.add_fetch(encrypted, conn, file, hub_token="")
        validation_tasks.add_fetch(encrypted, conn, file, hub_token="hf_of_the_tenant")
    for status in ("todo", "doing"):
        with encrypted.engine.begin() as conn:
            conn.execute(sa.text(f"UPDATE tasks.procrastinate_jobs SET status = '{status}' WHERE args ->> 'sealed_token' <> ''"))
        with pytest.raises(Conflict, match="1 imports wait with an older one"):
            key_rotation.retire(encrypted)
    with encrypted.engine.begin() as conn:
        conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs WHERE args ->> 'sealed_token' <> ''"))
    assert key_rotation.retire(encrypted) == {"secrets.key": 1}


def test_a_secret_that_a_process_encrypts_with_the_old_key_after_the_rotation_is_kept(encrypted: Platform) -> None:
    tenant, _ = tenants.create(encrypted, "t-late")
    (old,) = keys_in(encrypted.settings.secrets_key_file)
    key_rotation.rotate(encrypted)
    made = endpoint(encrypted, tenant.id)
    sealed = Fernet(old).encrypt(b"https://example.com/late").decode()
    with encrypted.engine.begin() as conn:
        conn.execute(sa.update(webhook_endpoints).where(webhook_endpoints.c.id == made).values(sealed_url=sealed))
    aged(encrypted)
    assert key_rotation.retire(encrypted) == {"secrets.key": 1}
    assert webhooks.get(encrypted, tenant.id, made).url == "https://example.com/late"


def test_a_secret_that_no_key_opens_stays_and_stops_no_rotation(encrypted: Platform) -> None:
    tenant, _ = tenants.create(encrypted, "t-lost")
    lost = endpoint(encrypted, tenant.id)
    sealed = Fernet(Fernet.generate_key()).encrypt(b"https://example.com").decode()
    with encrypted.engine.begin() as conn:
        conn.execute(sa.update(webhook_endpoints).where(webhook_endpoints.c.id == lost).values(sealed_url=sealed))
    assert key_rotation.rotate(encrypted).added[0] == "secrets.key"
    with encrypted.engine.connect() as conn:
        assert conn.execute(sa.select(webhook_endpoints.c.sealed_url).where(webhook_endpoints.c.id == lost)).scalar_one() == sealed


def test_keys_are_not_exchanged_during_a_backup(encrypted: Platform) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    assert isinstance(encrypted.objects, LocalObjectStore)
    with object_links.held([encrypted.objects.root]):
        for exchange in (key_rotation.rotate, key_rotation.retire):
            with pytest.raises(Conflict, match="backup"):
                exchange(encrypted)
    assert key_rotation.rotate(encrypted).added


def test_an_upload_that_outlasts_a_rotation_is_readable(encrypted: Platform) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            if not found and len(keys_in(encrypted.settings.secrets_key_file)) == 1:
                assert key_rotation.rotate(encrypted).added == ("secrets.key", "a")
                aged(encrypted)
                assert key_rotation.retire(encrypted) == {"secrets.key": 1, "a": 1}
            return found

    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    encrypted.objects.put_stream("tenants/a/slow", Slow(TEXT))
    assert {store_of(encrypted).get_bytes(f"tenants/a/{name}") for name in ("x", "slow")} == {TEXT}


def test_what_no_key_opens_is_named_and_stops_no_rotation(encrypted: Platform) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    objects = encrypted.settings.home / "objects"
    (objects / "tenants/a/odd").write_bytes(MARK + b"=" * ENVELOPE_BYTES)
    (objects / KEYS / "b").write_text("of another installation\n")
    (objects / KEYS / "b").chmod(0o600)
    done = key_rotation.rotate(encrypted)
    assert (done.added, done.num_objects) == (("secrets.key", "a"), 1)
    assert done.unreadable == (f"{KEYS}/b", "tenants/a/odd")
    aged(encrypted)
    assert key_rotation.retire(encrypted) == {"secrets.key": 1, "a": 1}
    assert store_of(encrypted).get_bytes("tenants/a/x") == TEXT


def test_a_key_file_that_is_being_written_is_no_tenants(encrypted: Platform) -> None:
    for key in ("tenants/a/x", "suites/s"):
        encrypted.objects.put_bytes(key, TEXT)
    (encrypted.settings.home / "objects" / KEYS / ".b.77.0a1b2c3d").write_text("")
    assert key_rotation.rotate(encrypted).added == ("secrets.key", ".installation", "a")


def test_a_key_file_that_is_replaced_while_it_is_read_is_read_again(encrypted: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    encrypted.objects.put_bytes("tenants/a/x", TEXT)
    reader, whole = store_of(encrypted), TenantKeys.lines

    def replaced_then(self: TenantKeys, owner: str) -> list[str]:
        found = whole(self, owner)
        monkeypatch.setattr(TenantKeys, "lines", whole)
        key_rotation.rotate(encrypted, tenant="a")
        return found

    monkeypatch.setattr(TenantKeys, "lines", replaced_then)
    reader.put_bytes("tenants/a/y", TEXT)
    assert {reader.get_bytes(f"tenants/a/{name}") for name in "xy"} == {TEXT}
