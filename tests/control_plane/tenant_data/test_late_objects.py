"""Objects and records that appear again, or that a store keeps, while a tenant's data is deleted."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import sqlalchemy as sa

from control_plane.evaluations.tables import evaluations
from control_plane.platform.protocols import Search
from control_plane.tenant_data import deletion, erasure
from control_plane.tenant_data.tables import deletion_objects
from core import layout
from tests.control_plane.tenant_data.test_deletion import world_file
from tests.support.platform.deletable_tenants import Weak, World


def test_what_a_step_wrote_after_the_first_look_is_found_by_the_second_and_both_bytes_of_a_key_are_proven(world: World) -> None:
    tenant = world.tenant()
    key = f"{layout.tenant_prefix(tenant)}/packs/pk/shard-00000.parquet"
    world.store.put_bytes(key, b"one")
    id_ = world.delete_data(tenant)
    assert not deletion.carry_out(world.platform, id_)
    world.store.put_bytes(key, b"two")
    world.clock.now += erasure.TenantData.SETTLES
    assert not deletion.carry_out(world.platform, id_), "what came late starts the wait anew"
    world.clock.now += erasure.TenantData.SETTLES
    assert deletion.carry_out(world.platform, id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert [o["sha256"] for o in proof["objects"]] == [hashlib.sha256(data).hexdigest() for data in (b"one", b"two")]
    assert float(proof["verified_absent_at"]) - float(proof["first_absent_at"]) == erasure.TenantData.SETTLES.total_seconds()


@dataclass(kw_only=True)
class Notes:
    """Another system that records ids."""

    name: ClassVar[str] = "notes"
    ids: set[str]

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:
        found = self.ids.intersection(ids)
        self.ids -= found
        return {"ids": len(found)}

    def search(self, tenant: str, ids: Collection[str]) -> Search:
        return Search(store=self.name, searched=["ids"], found=sorted(self.ids.intersection(ids)))


def test_what_another_system_records_is_erased_and_what_it_recorded_after_the_first_look_too(world: World) -> None:
    tenant, other = world.tenant(), world.tenant()
    id_, others = world.trained(tenant), world.trained(other)
    job_id = world.row(id_).job_id
    links = {"tenant_id": tenant, "job_id": job_id, "adapter_id": id_, "base_model": "tiny-base", "base_digest": "d"}
    with world.platform.engine.begin() as conn:
        conn.execute(sa.insert(evaluations).values(id="ev-1", **links, kind="manual", state="queued", created_at=world.clock.now))
    notes = Notes(ids={id_, job_id, world_file(world, tenant), "ev-1", others})
    world.platform = replace(world.platform, records=(notes,))
    deletion_id = world.delete_data(tenant)
    assert not deletion.carry_out(world.platform, deletion_id)
    assert notes.ids == {others}
    notes.ids.add(job_id)
    world.clock.now += erasure.TenantData.SETTLES
    assert world.carried_out(deletion_id), "what came late starts the wait anew"
    proof = deletion.get(world.platform, tenant, deletion_id).proof
    assert proof["records"] == [{"store": "notes", "ids": 4}, {"store": "notes", "ids": 1}]
    assert proof["searched"] == [{"store": "notes", "searched": ["ids"], "found": 0}]


class Returning(Weak):
    """A store to which a slow writer brings one of two objects back, with the same bytes, when the other one is deleted."""

    def __init__(self, root: Path, *, keys: tuple[str, str], times: int) -> None:
        super().__init__(root)
        self.keys, self.times = keys, times

    def delete(self, key: str) -> None:
        super().delete(key)
        other = next((k for k in self.keys if k != key), None) if key in self.keys else None
        if other is not None and self.times and not self.exists(other):
            self.times -= 1
            self.put_bytes(other, b"a row of acme")


def returning(world: World, *, times: int) -> tuple[str, str, str]:
    """A tenant, the key that returns, and the deletion of the tenant's data."""
    tenant = world.tenant()
    keys = (f"{layout.tenant_prefix(tenant)}/files/file-1/a.jsonl", f"{layout.tenant_prefix(tenant)}/files/file-1/b.jsonl")
    world.store = Returning(world.platform.settings.home / "objects", keys=keys, times=times)
    world.platform = replace(world.platform, objects=world.store)
    for key in keys:
        world.store.put_bytes(key, b"a row of acme")
    return tenant, keys[0], world.delete_data(tenant)


def test_an_object_that_is_there_again_with_the_same_bytes_while_others_are_deleted_is_deleted_again(world: World) -> None:
    tenant, _, id_ = returning(world, times=2)
    assert world.carried_out(id_)
    assert world.keys(layout.tenant_prefix(tenant)) == []
    proven = deletion.get(world.platform, tenant, id_).proof["objects"]
    assert [o["sha256"] for o in proven] == [hashlib.sha256(b"a row of acme").hexdigest()] * 2


def test_objects_that_keep_appearing_leave_a_deletion_open_until_they_stop(world: World) -> None:
    tenant, _, id_ = returning(world, times=4)
    assert not deletion.carry_out(world.platform, id_)
    assert "new objects appeared during the deletion" in str(deletion.get(world.platform, tenant, id_).waiting_for)
    assert world.carried_out(id_)
    assert world.keys(layout.tenant_prefix(tenant)) == []


def test_an_object_that_returns_after_the_first_look_starts_the_wait_anew_also_with_the_same_bytes(world: World) -> None:
    tenant, key, id_ = returning(world, times=0)
    assert not deletion.carry_out(world.platform, id_)
    world.clock.now += erasure.TenantData.SETTLES
    world.store.put_bytes(key, b"a row of acme")
    assert not deletion.carry_out(world.platform, id_)
    assert "a second look follows" in str(deletion.get(world.platform, tenant, id_).waiting_for)
    assert world.keys(layout.tenant_prefix(tenant)) == []
    world.clock.now += erasure.TenantData.SETTLES
    assert deletion.carry_out(world.platform, id_)


class Keeping(Weak):
    """A store that says it deleted and did not."""

    def delete(self, key: str) -> None:
        pass


def test_an_object_that_a_store_keeps_is_not_called_deleted(world: World) -> None:
    tenant, root = world.tenant(), world.platform.settings.home / "objects"
    key = f"{layout.tenant_prefix(tenant)}/files/file-1/a.jsonl"
    world.store.put_bytes(key, b"a row of acme")
    id_ = world.delete_data(tenant)
    assert not deletion.carry_out(replace(world.platform, objects=Keeping(root)), id_)
    assert "still exists after its deletion" in str(deletion.get(world.platform, tenant, id_).waiting_for)
    with world.platform.engine.connect() as conn:
        noted = conn.execute(sa.select(deletion_objects.c.deleted_at).where(deletion_objects.c.deletion_id == id_)).scalars()
        assert list(noted) == [None]
    assert world.carried_out(id_)
