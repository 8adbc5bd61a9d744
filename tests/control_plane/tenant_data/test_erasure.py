"""What a deletion leaves nowhere: on the nodes of a machine, of former members, and of the keys that encrypted the objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.fernet import Fernet, MultiFernet

from control_plane.adapters import service as adapters
from control_plane.datasets import suites
from control_plane.serving import node_files
from control_plane.tenant_data import deletion, deletion_requests, erasure
from control_plane.tenants import members
from ft_assets import layout
from ft_assets.adapters.stages import GRACE
from ft_assets.errors import IntegrityError
from resources.object_store.tenant_keys import KEYS, TenantKeys
from tests.support.platform.deletable_tenants import SECRET, Weak, World, killed_while_working, texts_of_database

INSTALLATION_KEY = Fernet.generate_key()


def kept_on_nodes(world: World, tenant: str, id_: str) -> set[Path]:
    """A file in every directory in which this machine may keep something of a tenant and its adapter; their paths."""
    platform, work, record = world.platform, world.platform.settings.work_dir, adapters.get_adapter(world.platform, tenant, id_)
    nodes = (work, work / "nodes" / "1", work / "nodes" / "2")
    of_adapter = [
        node_files.directory(platform, record), node_files.directory(platform, record, "c" * 64),
        platform.settings.adapters_dir / ".making" / "tmp1" / id_, platform.settings.servers_dir / id_,
    ]  # fmt: skip
    of_tenant = [suites._place(platform, tenant, "d" * 64), *(work / name / tenant / "x" for name in ("datasets", "packs"))]
    of_job = [place for node in nodes for place in (node / "jobs" / record.job_id, node / "launcher" / f"{record.job_id}-a1")]
    made = set[Path]()
    for directory in (*of_adapter, *of_tenant, *of_job, *(node / "inputs" / tenant for node in nodes)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "part").write_text(SECRET)
        made.add(directory / "part")
    return made | {killed_while_working(work, tenant) / "upload"}


def test_no_directory_of_a_tenant_is_left_on_any_node_of_the_machine(world: World) -> None:
    tenant, other = world.tenant(), world.tenant()
    mine, theirs = (kept_on_nodes(world, one, world.trained(one)) for one in (tenant, other))
    assert world.carried_out(world.delete_data(tenant))
    assert [str(path) for path in sorted(mine) if path.exists()] == []
    assert [str(path) for path in sorted(theirs) if not path.exists()] == []
    left = [path for path in world.platform.settings.work_dir.rglob("*") if tenant in path.name and any(path.rglob("*"))]
    assert left == []


def test_no_copy_of_an_adapter_is_left_on_any_node_of_the_machine(world: World) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    there = kept_on_nodes(world, tenant, id_)
    world.clock.now += 2 * GRACE
    (asked,) = deletion_requests.archive_due(world.platform)
    assert deletion.carry_out_all(world.platform) == [asked]
    job_id = world.row(id_).job_id
    copies = [path for path in there if id_ in str(path) or f"jobs/{job_id}" in str(path)]
    assert len(copies) == 7
    assert [str(path) for path in copies if path.exists()] == []
    assert any(path.exists() for path in there), "what other adapters of the tenant need stays"


def test_former_members_lose_their_names_and_addresses_and_present_ones_are_named_in_the_proof(world: World) -> None:
    tenant = world.tenant()
    world.trained(tenant)
    gone, stays = (
        members.add(world.platform, tenant, email=f"{name}@example.com", role="viewer", name=f"{name} Doe") for name in ("gone", "stays")
    )
    members.remove(world.platform, tenant, gone.id)
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    found = texts_of_database(world.platform)
    assert [text for text in ("gone@example.com", "gone Doe") if text in found] == []
    assert members.get(world.platform, tenant, stays.id).email == "stays@example.com"
    (kept,) = [one["what"] for one in deletion.get(world.platform, tenant, id_).proof["kept"] if "keys" in one["what"]]
    assert "members with their names and e-mail addresses" in kept


def test_the_key_that_encrypted_a_tenants_objects_is_destroyed_with_them(world: World) -> None:
    """A copy of an object, as a backup has it, cannot be read any more; the tenant goes on with another key."""
    store = Weak(world.platform.settings.home / "encrypted", keys=None, encrypts=False)
    keys = TenantKeys(store.root / KEYS, lambda: MultiFernet([Fernet(INSTALLATION_KEY)]))
    store = Weak(store.root, keys=keys, encrypts=True)
    world.store, world.platform = store, replace(world.platform, objects=store)
    tenant, other = world.tenant(), world.tenant()
    key, theirs = (f"{layout.tenant_prefix(one)}/files/file-1/a.jsonl" for one in (tenant, other))
    for one in (key, theirs):
        store.put_bytes(one, SECRET.encode())
    copy = (store.root / key).read_bytes()
    before = keys.lines(tenant), keys.lines(other)
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert (proof["num_objects"], proof["keys_destroyed"]) == (1, 1)
    assert len(keys.lines(tenant)) == 1 and keys.lines(tenant) != before[0] and keys.lines(other) == before[1]
    (store.root / key).parent.mkdir(parents=True, exist_ok=True)
    (store.root / key).write_bytes(copy)
    with pytest.raises(IntegrityError, match="no key"):
        store.get_bytes(key)
    store.put_bytes(f"{key}2", b"new")
    assert (store.get_bytes(f"{key}2"), store.get_bytes(theirs)) == (b"new", SECRET.encode())


def test_an_upload_that_comes_while_keys_are_exchanged_is_deleted_before_the_old_key(world: World) -> None:
    keys = TenantKeys(world.store.root / KEYS, lambda: MultiFernet([Fernet(INSTALLATION_KEY)]))

    class Late(Weak):
        late: tuple[str, bytes] | None = None

        def renew_keys(self, tenant: str) -> None:
            super().renew_keys(tenant)
            if self.late is not None:
                self.put_bytes(*self.late)
                self.late = None

    store = Late(world.store.root, keys=keys, encrypts=True)
    world.store, world.platform = store, replace(world.platform, objects=store)
    tenant = world.tenant()
    store.put_bytes(f"{layout.tenant_prefix(tenant)}/files/file-1/a.jsonl", b"row")
    id_ = world.delete_data(tenant)
    assert not deletion.carry_out(world.platform, id_)
    world.clock.now += erasure.TenantData.SETTLES
    store.late = f"{layout.tenant_prefix(tenant)}/files/file-2/b.jsonl", b"late"
    assert not deletion.carry_out(world.platform, id_), "what came late is looked for a second time, too"
    world.clock.now += erasure.TenantData.SETTLES
    assert deletion.carry_out(world.platform, id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert [one["bytes"] for one in proof["objects"]] == [3, 4]
    assert len(keys.lines(tenant)) == 1
