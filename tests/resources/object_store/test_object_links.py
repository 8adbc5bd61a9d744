"""What is deleted while a backup runs is in the backup all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import Conflict
from resources.object_store.local import LocalObjectStore
from resources.object_store.object_links import ObjectLinks, held, remove_abandoned


def contents(links: ObjectLinks) -> dict[str, bytes]:
    return {path: link.read_bytes() for path, link in links.files()}


def test_an_object_that_is_deleted_meanwhile_stays_linked_and_a_new_one_is_added(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "objects")
    for key in ("tenants/a/kept", "tenants/a/deleted", "tenants/a/replaced"):
        store.put_bytes(key, b"old")
    links = ObjectLinks([store.root])
    assert links.add() == 3
    store.delete("tenants/a/deleted")
    store.put_bytes("tenants/a/replaced", b"new")
    store.put_bytes("tenants/b/added", b"new")
    assert links.add() == 2, "the added and the replaced one"
    assert contents(links) == {
        "tenants/a/deleted": b"old", "tenants/a/kept": b"old", "tenants/a/replaced": b"new", "tenants/b/added": b"new",
    }  # fmt: skip
    assert links.has("tenants/a")
    assert links.has("tenants/a/deleted")
    assert not links.has("tenants/c")
    assert [info.key for info in store.list("")] == ["tenants/a/kept", "tenants/a/replaced", "tenants/b/added"], "readers see no links"
    links.remove()
    assert contents(links) == {}
    assert store.get_bytes("tenants/a/kept") == b"old"


def test_links_of_a_killed_backup_are_removed_and_keys_are_linked(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "objects", cold=tmp_path / "cold")
    (store.root / ".keys").mkdir()
    (store.root / ".keys/acme").write_text("sealed")
    store.put_bytes("tenants/acme/x", b"1")
    store.cool("tenants/acme")
    ObjectLinks([store.root]).add()
    (store.root / ".backup/left").write_text("over")
    with held([store.root, tmp_path / "cold"]) as links:
        links.add()
        assert contents(links) == {".keys/acme": b"sealed", "tenants/acme/x": b"1"}
    assert contents(links) == {}


def test_the_worker_removes_links_that_no_backup_holds(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "objects")
    assert not remove_abandoned(store)
    store.put_bytes("tenants/acme/x", b"1")
    with held([store.root]) as links:
        links.add()
        assert not remove_abandoned(store), "a backup is running"
        assert contents(links) == {"tenants/acme/x": b"1"}
        with pytest.raises(Conflict, match="a backup of"), held([store.root]):
            pass
    ObjectLinks([store.root]).add()
    assert remove_abandoned(store)
    assert not (store.root / ".backup").exists()


def test_links_of_deleted_objects_are_dropped_unless_something_refers_to_them(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "objects")
    for key in ("tenants/a/files/f/x", "tenants/a/files/g/x", "tenants/b/jobs/j/ckpt/1/w"):
        store.put_bytes(key, b"x")
    with held([store.root]) as links:
        assert links.add() == 3
        for key in ("tenants/a/files/f/x", "tenants/b/jobs/j/ckpt/1/w"):
            store.delete(key)
        assert links.drop_deleted(lambda paths: {"tenants/b/jobs/j/ckpt/1"} & set(paths)) == 1
        assert [path for path, _ in links.files()] == ["tenants/a/files/g/x", "tenants/b/jobs/j/ckpt/1/w"]
