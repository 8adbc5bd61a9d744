"""An encrypted object is read as it was put, under its own key, or refused by name: whatever was done to the files of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet, MultiFernet

from agent.objects import _copy
from core.encrypted_files import CHUNK_BYTES, ENVELOPE_BYTES, HEAD_BYTES, MARK, TAG_BYTES
from core.errors import IntegrityError
from resources.object_store import LOCAL_KEYS, LocalObjectStore, from_url
from resources.object_store.tenant_keys import KEYS

CHUNK = CHUNK_BYTES + TAG_BYTES
MINE, NEIGHBOUR, FOREIGN = "tenants/acme/x", "tenants/acme/y", "tenants/beta/x"
NAMES = (MINE, NEIGHBOUR, FOREIGN)
INSTALLATION = MultiFernet([Fernet(Fernet.generate_key())])
Change = Callable[[dict[str, bytes]], bytes]
"""Makes the new bytes of `MINE` of those of all objects."""


def plain(key: str) -> bytes:
    return (f"{key} " * (3 * CHUNK_BYTES // 10)).encode()[: 3 * CHUNK_BYTES + 100]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalObjectStore:
    made = from_url(f"file://{tmp_path_factory.mktemp('objects')}", tenant_key=LOCAL_KEYS, cipher=lambda: INSTALLATION)
    assert isinstance(made, LocalObjectStore)
    for key in (*NAMES, "old"):
        made.put_bytes(key, plain(MINE if key == "old" else key))
    return made


@pytest.fixture(scope="module")
def stored(store: LocalObjectStore) -> dict[str, bytes]:
    """The files as they were written; ``old`` is an earlier one of the first."""
    found = {key: (store.root / key).read_bytes() for key in NAMES}
    store.put_bytes(MINE, plain(MINE))
    return {**found, "old": found[MINE], MINE: (store.root / MINE).read_bytes()}


def head(data: bytes) -> bytes:
    return data[:HEAD_BYTES]


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK] for at in range(HEAD_BYTES, len(data), CHUNK)]


def flipped(at: int) -> Change:
    return lambda s: s[MINE][:at] + bytes([s[MINE][at] ^ 0x10]) + s[MINE][at + 1 :]


def cut(size: int) -> Change:
    return lambda s: s[MINE][:size]


def rearranged(*order: int) -> Change:
    return lambda s: head(s[MINE]) + b"".join(chunks(s[MINE])[at] for at in order)


LEFT = (1, 8, 15, 16, 17, 100, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 5, HEAD_BYTES + CHUNK)
CHANGES: dict[str, Change] = {
    **{f"{size} bytes are left": cut(size) for size in LEFT},
    "the last byte is missing": cut(-1),
    **{f"a bit of byte {at}": flipped(at) for at in (0, 7, 15, 16, 17, 60, 150, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + CHUNK - 1, -1)},
    "the object of a neighbour": lambda s: s[NEIGHBOUR], "the object of another tenant": lambda s: s[FOREIGN],
    "the envelope of a neighbour": lambda s: head(s[NEIGHBOUR]) + s[MINE][HEAD_BYTES:],
    "the envelope of another tenant": lambda s: head(s[FOREIGN]) + s[MINE][HEAD_BYTES:],
    "its envelope with a neighbour's chunks": lambda s: head(s[MINE]) + s[NEIGHBOUR][HEAD_BYTES:],
    "its envelope with its own earlier chunks": lambda s: head(s[MINE]) + s["old"][HEAD_BYTES:],
    "one earlier chunk": lambda s: head(s[MINE]) + b"".join([chunks(s["old"])[0], *chunks(s[MINE])[1:]]),
    "an envelope of zeros": lambda s: MARK + bytes(ENVELOPE_BYTES) + s[MINE][HEAD_BYTES:],
    "an envelope of another installation": lambda s: MARK + Fernet(Fernet.generate_key()).encrypt(bytes(64)) + s[MINE][HEAD_BYTES:],
    "the first two chunks exchanged": rearranged(1, 0, 2, 3), "the first chunk left out": rearranged(1, 2, 3),
    "a chunk in the middle left out": rearranged(0, 2, 3), "the last chunk left out": rearranged(0, 1, 2),
    "a chunk twice": rearranged(0, 1, 1, 2, 3),
    "the last chunk twice": rearranged(0, 1, 2, 3, 3), "the last chunk first": rearranged(3, 0, 1, 2),
    "a byte more": lambda s: s[MINE] + b"x", "another object behind it": lambda s: s[MINE] + s[NEIGHBOUR],
}  # fmt: skip


def granted(url: str, target: Path) -> bytes | None:
    """What an agent reads by a URL that it was granted before; None if it is refused."""
    try:
        _copy(url, target, lambda: None)
    except IntegrityError:
        return None
    return target.read_bytes()


def pieces(store: LocalObjectStore) -> Iterator[bytes]:
    with store.open(MINE) as source:
        while piece := source.read(100_000):
            yield piece


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_refused_by_name_and_leaves_no_file(
    store: LocalObjectStore, stored: dict[str, bytes], tmp_path: Path, change: str
) -> None:
    path = store.root / MINE
    assert store.get_bytes(MINE) == plain(MINE)
    url = store.read_url(MINE)
    path.write_bytes(CHANGES[change](stored))
    try:
        for read in (lambda: store.get_bytes(MINE), lambda: store.get_file(MINE, tmp_path / "copied")):
            with pytest.raises(IntegrityError, match=rf"object '{MINE}'.*from a backup"):
                read()
        assert granted(url, tmp_path / "fetched") in (None, plain(MINE)), "an agent has the key, so another envelope hurts nobody"
        read_on = list[bytes]()
        with pytest.raises(IntegrityError):
            read_on += pieces(store)
        assert plain(MINE).startswith(b"".join(read_on)), "no byte is read that was not written"
        assert list(tmp_path.glob("copied*")) == list(tmp_path.glob(".copied*")) == []
        assert [info.key for info in store.list("tenants/acme")] == [MINE, NEIGHBOUR], "it is listed, so that it can be found and deleted"
    finally:
        path.write_bytes(stored[MINE])


def test_a_tenants_key_file_opens_nothing_of_another(store: LocalObjectStore, stored: dict[str, bytes]) -> None:
    acme, beta = (store.root / KEYS / name for name in ("acme", "beta"))
    kept = acme.read_bytes(), beta.read_bytes()
    acme.write_bytes(kept[1])
    try:
        with pytest.raises(IntegrityError, match="no key in"):
            store.get_bytes(MINE)
        (store.root / MINE).write_bytes(stored[FOREIGN])
        with pytest.raises(IntegrityError, match="no key in"):
            store.get_bytes(MINE)  # the key opens it, and it is another object
    finally:
        acme.write_bytes(kept[0])
        (store.root / MINE).write_bytes(stored[MINE])
    assert store.get_bytes(MINE) == plain(MINE)
