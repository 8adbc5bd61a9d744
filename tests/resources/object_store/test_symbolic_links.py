"""A symbolic link in the directory of a store leads nowhere: what it points to is neither read, listed, replaced nor deleted."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import FtError, IntegrityError, InvalidRequest
from resources.object_store.local import LocalObjectStore
from resources.object_store.object_links import held

SECRET = b"of another tenant, or of this machine"
KEY = "tenants/acme/files/f/rows.jsonl"
LINKED = {
    # what is a link, in place of the object or of a directory above it
    "the object": KEY, "its directory": "tenants/acme/files/f", "a directory further up": "tenants/acme", "the first directory": "tenants",
}  # fmt: skip


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files outside of the store, as they would be if the link were a directory."""
    made = tmp_path / "outside"
    (made / "acme/files/f").mkdir(parents=True)
    for place in ("rows.jsonl", "f/rows.jsonl", "files/f/rows.jsonl", "acme/files/f/rows.jsonl"):
        (made / place).parent.mkdir(parents=True, exist_ok=True)
        (made / place).write_bytes(SECRET)
    return made


@pytest.fixture
def store(tmp_path: Path) -> LocalObjectStore:
    made = LocalObjectStore(tmp_path / "objects", cold=tmp_path / "cold")
    (tmp_path / "cold").mkdir()
    made.put_bytes("suites/s.jsonl", b"plain")
    return made


def plant(root: Path, linked: str, outside: Path) -> Path:
    """Put a link where `linked` is, to the file or directory outside that stands for it."""
    link = root / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "rows.jsonl" if linked == KEY else outside / ("" if linked == "tenants/acme/files/f" else "."))
    return link


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


CALLS: dict[str, Callable[[LocalObjectStore, Path], object]] = {
    "read": lambda store, to: store.get_bytes(KEY), "open": lambda store, to: store.open(KEY), "copy": lambda store,
    to: store.get_file(KEY, to),
    "read by URL": lambda store, to: store.read_url(KEY), "look": lambda store, to: store.exists(KEY),
    "write": lambda store, to: store.put_bytes(KEY, b"x"), "write by URL": lambda store, to: store.begin_upload(KEY, ["0" * 64]),
}  # fmt: skip


PLACES = [(call, where) for call in CALLS for where in ("objects", "cold") if where == "objects" or not call.startswith("write")]
"""Calls, and where the link is: what is written is warm."""


@pytest.mark.parametrize(("call", "where"), PLACES)
@pytest.mark.parametrize("linked", LINKED)
def test_no_call_goes_through_a_link(store: LocalObjectStore, outside: Path, tmp_path: Path, call: str, linked: str, where: str) -> None:
    link = plant(tmp_path / where, LINKED[linked], outside)
    before = contents(outside)
    with pytest.raises(IntegrityError) as refused:
        CALLS[call](store, tmp_path / "copied")
    assert refused.value.code == "object_store_link" and str(link) in refused.value.message
    assert contents(outside) == before
    assert not (tmp_path / "copied").exists()
    assert store.get_bytes("suites/s.jsonl") == b"plain", "the others are there"


@pytest.mark.parametrize("linked", LINKED)
def test_a_listing_and_a_cooling_leave_links_out(store: LocalObjectStore, outside: Path, linked: str) -> None:
    plant(store.root, LINKED[linked], outside)
    assert [info.key for info in store.list("")] == ["suites/s.jsonl"]
    for listing in (lambda: list(store.list("tenants/acme/files/f")), lambda: store.cool("tenants/acme/files/f")):
        if linked == "the object":
            assert not listing()
        else:
            with pytest.raises(IntegrityError):
                listing()
    assert contents(outside) and all(content == SECRET for content in contents(outside).values())


def test_a_link_to_a_directory_above_it_is_no_loop(store: LocalObjectStore) -> None:
    store.put_bytes(KEY, b"rows")
    (store.root / "tenants/acme/files/again").symlink_to(store.root / "tenants")
    (store.root / "tenants/nowhere").symlink_to("/nonexistent")
    assert [info.key for info in store.list("tenants")] == [KEY]


def test_deleting_removes_a_link_and_nothing_that_it_points_to(store: LocalObjectStore, outside: Path) -> None:
    link = plant(store.root, KEY, outside)
    store.delete(KEY)
    assert not link.is_symlink() and (outside / "rows.jsonl").read_bytes() == SECRET
    link.parent.rmdir()
    link.parent.symlink_to(outside)
    with pytest.raises(IntegrityError):
        store.delete(KEY)
    assert (outside / "rows.jsonl").read_bytes() == SECRET


def test_a_backup_copies_nothing_through_a_link(store: LocalObjectStore, outside: Path) -> None:
    plant(store.root, KEY, outside)
    (store.root / "tenants/beta").symlink_to(outside)
    with held([store.root]) as links:
        links.add()
        assert {path: link.read_bytes() for path, link in links.files()} == {"suites/s.jsonl": b"plain"}


def test_the_store_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "objects").symlink_to(tmp_path / "disk")
    store = LocalObjectStore(tmp_path / "objects")
    store.put_bytes(KEY, b"rows")
    assert store.get_bytes(KEY) == b"rows" and [info.key for info in store.list("")] == [KEY]


NO_KEYS = {
    "a name of 256 bytes": f"tenants/{'a' * 256}", "a name of 256 bytes in few characters": f"tenants/{chr(0x20AC) * 86}",
    "a key of 1,025 bytes": "/".join(["a" * 204] * 5) + "/", "a NUL": "tenants/a\0b", "a NUL at the end": f"{KEY}\0",
    "..": "tenants/../../x",
    ".. at the end": "tenants/acme/..", "an absolute path": "/etc/passwd", "two slashes": "//etc/passwd", "a drive": "C:\\x", "a URL": "file:///x",
    "a line break": "tenants/a\nb", "an escape": "tenants/\x1b[2J", "half a character": "tenants/\ud800",
    "a space without a width": "tenants/a\u200bb",
    "a change of direction": "tenants/a\u202egnp.exe", "the keys": ".keys/acme", "the staging directory": ".staging/x",
    "a hidden file": ".x",
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_KEYS)
def test_what_is_no_key_is_refused_by_every_call(store: LocalObjectStore, tmp_path: Path, kind: str) -> None:
    key, before = NO_KEYS[kind], contents(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.put_bytes(key, b"x"), lambda: store.get_bytes(key), lambda: store.get_file(key, tmp_path / "copied"),
        lambda: store.exists(key), lambda: list(store.list(key)), lambda: store.delete(key), lambda: store.cool(key),
        lambda: store.read_url(key), lambda: store.begin_upload(key, ["0" * 64]), lambda: store.uri(key),
        lambda: store.renew_envelopes(key),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.code == "invalid_object_key"
    assert contents(tmp_path) == before


@pytest.mark.parametrize("alike", ["caf\u00e9", "\u212bngstr\u00f6m", "\uff0e\uff0e", "a\u2215b", "\u0430cme", "\ufb01le"])
def test_names_that_look_alike_are_different_objects(store: LocalObjectStore, alike: str) -> None:
    names = {form: unicodedata.normalize(form, alike) for form in ("NFC", "NFD", "NFKC")}
    names = {form: name for form, name in names.items() if name not in ("..", "a/b")} | {"as it is": alike}
    keys = {f"tenants/acme/{name}" for name in names.values()}
    for key in keys:
        store.put_bytes(key, key.encode())
    assert {info.key for info in store.list("tenants/acme")} == keys
    assert {store.get_bytes(key).decode() for key in keys} == keys


def test_the_longest_keys_are_stored(store: LocalObjectStore) -> None:
    for key in ("a" * 255, "/".join(["a" * 204] * 5)):
        store.put_bytes(key, b"x")
        assert store.get_bytes(key) == b"x"
        store.delete(key)
    with pytest.raises(FtError):
        store.get_bytes("a" * 255)
