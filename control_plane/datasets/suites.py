"""Contamination lists that datasets are checked against (those that ship, the operator's, each tenant's own), and the index over a set of
them.

An operator's list replaces a built-in one of the same name. The index is built once per set, stored under the set's digest, and cached on
this machine's disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.datasets import orphaned_objects
from control_plane.datasets.tables import Dataset, Suite, datasets, eval_suites
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many, one
from control_plane.platform.transfer import archive, download, upload
from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_parent import Limits, run_sandboxed
from control_plane.tenants.service import find_tenant, refuse_while_deleted
from core import layout
from core.durable_files import mark_used, remove_unused, sha256_of
from core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from engine.data import Problem, contamination, field_of, field_text, open_rows, shipped_index, shipped_place, shipped_suites

MAX_FILE_BYTES = 256 << 20
"""Size limit of one suite's file: MMLU's test split, the largest of the usual ones, has 7 MB."""
MAX_ITEM_BYTES = 128 << 20
"""Limit on the items of all of a tenant's suites (or of one of the operator's). Their index takes 13 times their size to build (measured
with 96 MiB); this leaves a third of a child's memory to the operator's suites, which share the index."""
MAX_ITEMS = 200_000
MAX_FIELDS = 8
"""Fields joined into an item: a question, its answers and their context. MMLU has two, the widest of the usual suites five."""
MAX_SUITES = 20
"""Suites per tenant: there are about a dozen usual ones for language models, and the operator has those."""
INDEXER = "control_plane.sandbox.task_index"
INDEX_WALL_S = 900.0
"""Time limit of building: thirty times what 128 MiB of items take (5 MiB per second on one core)."""
CHUNK_BYTES = 1 << 20
DONE = "complete"
"""Stored after all other files of an index; without it the index is incomplete."""
VERSIONS_READ = 100
"""Newest dataset versions that are looked at to show where a suite was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteUse:
    """Where a suite was looked for."""

    num_checked: int
    """Dataset versions that were compared with it."""
    found: Sequence[tuple[Dataset, int]]
    """Those that have rows of it, newest first, and how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Space:
    left: int
    """Bytes of items that may still be added."""
    keys: frozenset[str]
    """Object keys of the suites that were counted."""


def add(
    platform: Platform, tenant: str | None, stream: BinaryIO, *, name: str, filename: str, field: str,
    column_map: Mapping[str, str] | None = None, max_bytes: int = MAX_ITEM_BYTES,
) -> Suite:  # fmt: skip
    """Register the texts in `field` (several joined by ``,``) of a file's rows as a suite; without a tenant, the operator's.

    Applies to uploads validated from now on. `max_bytes` limits the items of all of the tenant's suites.
    """
    layout.checked_id(name, what="name")
    wanted = _fields(field)
    space = _space(platform, tenant, max_bytes)
    suite_id = f"suite-{uuid.uuid4().hex[:24]}"
    with scratch.directory(platform.settings.work_dir, tenant) as directory:
        received, items = directory / "received", directory / "items.jsonl"
        _receive(stream, received)
        num_items = _write_items(_texts(received, filename, wanted, column_map), items, max_bytes=space.left)
        key, digest, num_bytes = layout.suite_key(tenant, suite_id), sha256_of(items), items.stat().st_size
        values = {
            "id": suite_id, "tenant_id": tenant, "name": name, "field": field, "num_items": num_items, "sha256": digest, "object_key": key,
            "created_at": platform.clock(),
        }  # fmt: skip
        with _kept_if_named(platform, tenant, key):
            platform.objects.put_file(key, items)
            while (made := _inserted(platform, tenant, values, measured=space)) is None:
                space = _space(platform, tenant, max_bytes)
                if num_bytes > space.left:
                    raise _no_space(space.left)
            return made


@contextlib.contextmanager
def _kept_if_named(platform: Platform, tenant: str | None, key: str) -> Iterator[None]:
    """Store the object and write its row inside the context; on failure the object is deleted."""
    if tenant is not None:
        with orphaned_objects.announced(platform, tenant, key):
            yield
        return
    try:
        yield
    except Exception:
        platform.objects.delete(key)
        raise


def _inserted(platform: Platform, tenant: str | None, values: Mapping[str, Any], *, measured: _Space) -> Suite | None:
    """Write the row; None if a suite was added since the space was measured."""
    try:
        with platform.engine.begin() as conn:
            _check_accepts(conn, tenant)
            if tenant is not None:
                if not _own_keys(conn, tenant) <= measured.keys:
                    return None
                orphaned_objects.claim(conn, values["object_key"])
            return one(conn, sa.insert(eval_suites).values(**values).returning(eval_suites), Suite)
    except DuplicateRow:
        raise Conflict(
            f"a contamination list {values['name']!r} already exists; remove it first, or choose another name", code="suite_exists"
        ) from None


def add_benchmark(platform: Platform, stream: BinaryIO, *, name: str, filename: str) -> Suite:
    """Register a public benchmark from a local file for every tenant; its fields are recognized by the published format.

    Built-in suites are refused: their hashes cover more forms of the answers than the published file.
    """
    if name in {suite.name for suite in shipped_suites()}:
        raise InvalidRequest(
            f"{name} ships with the platform, and every dataset is held against it; there is nothing to register",
            code="invalid_suite",
            param="name",
        )
    with scratch.directory(platform.settings.work_dir, None) as directory:
        received = directory / "received"
        _receive(stream, received)
        rows = (row.value for row in open_rows(received, filename=filename, column_map=None, max_bytes=MAX_FILE_BYTES).rows)
        first = next((value for value in rows if isinstance(value, dict)), {})
        field = field_of(name, first, filename=filename)
        with received.open("rb") as again:
            return add(platform, None, again, name=name, filename=filename, field=field)


def list_suites(platform: Platform, tenant: str | None) -> Sequence[Suite]:
    """Return the suites that the tenant's datasets are checked against: built-in, the operator's, its own; without a tenant, the first
    two."""
    with platform.engine.connect() as conn:
        return _counting(_of(conn, tenant))


def _counting(registered: Sequence[Suite]) -> list[Suite]:
    """Return the built-in suites that the operator has not replaced, which have no object and no date; then `registered`."""
    replaced = {suite.name for suite in registered if suite.tenant_id is None}
    shipped = [
        Suite(
            id=f"shipped-{one.name}", tenant_id=None, name=one.name, field=one.field, num_items=one.num_items, sha256=one.sha256,
            object_key=None, created_at=None,
        )
        for one in shipped_suites()
        if one.name not in replaced
    ]  # fmt: skip
    return [*shipped, *registered]


def remove(platform: Platform, tenant: str | None, name: str) -> None:
    """Remove a suite; datasets that were checked against it still list it."""
    owner = eval_suites.c.tenant_id.is_(None) if tenant is None else eval_suites.c.tenant_id == tenant
    with platform.engine.begin() as conn:
        query = sa.delete(eval_suites).where(owner, eval_suites.c.name == name).returning(eval_suites.c.object_key)
        key: str | None = conn.execute(query).scalar_one_or_none()
        if key is None:
            raise NotFound(
                f"no contamination list {name[:80]!r}; list yours with `ft contamination list`", code="suite_not_found", param="name"
            )
        if tenant is not None:
            orphaned_objects.release(conn, tenant, [key], now=platform.clock())
    if tenant is not None:
        orphaned_objects.try_to_remove(platform, [key])
    else:
        platform.objects.delete(key)


def uses(platform: Platform, tenant: str) -> Mapping[str, SuiteUse]:
    """Return where each suite was looked for and found, by its :func:`label`, in the newest :data:`VERSIONS_READ` dataset versions."""
    stats = datasets.c.report["stats"].label("stats")
    newest = sa.select(*columns(datasets, Dataset), stats).where(datasets.c.tenant_id == tenant).order_by(datasets.c.created_at.desc())
    with platform.engine.connect() as conn:
        versions = many(conn, newest.limit(VERSIONS_READ), Dataset)
    checked, found = Counter[str](), defaultdict[str, list[tuple[Dataset, int]]](list)
    for version in versions:
        repeated = contamination(version.stats or {})
        checked.update(repeated.checked)
        for name, num_rows in repeated.suites.items():
            found[name].append((version, num_rows))
    return {name: SuiteUse(num_checked=number, found=found[name]) for name, number in checked.items()}


def index_directory(platform: Platform, tenant: str) -> Path:
    """Return the index over the suites that apply to `tenant`, on this machine."""
    try:
        return _index(platform, tenant)
    except NotFound:  # a suite was removed while its items were read; the others apply
        return _index(platform, tenant)


def index_archive(platform: Platform, tenant: str) -> Path:
    """Return a ZIP archive of that index, with which a client compares rows by itself: hashes, without any text.

    It is made once for a set of suites. Calls while it is made are refused at once (``Unavailable``, code ``index_being_built``): waiting
    is up to the client, and costs no thread.
    """
    made = _archive_of(_index_place(platform, tenant, list_suites(platform, tenant)))
    if made.exists():
        mark_used(made)
        return made
    with _one_at_a_time(made.parent):
        directory = index_directory(platform, tenant)
        files = [path for path in sorted(directory.iterdir()) if path.suffix in (".json", ".npy")]
        return archive(files, _archive_of(directory))


def _archive_of(index: Path) -> Path:
    return index.with_name(f"{index.name}.zip")


MAX_BUILDS = 2
"""Indexes that the API builds at once for downloads, in each process: each takes a thread for up to :data:`INDEX_WALL_S`, and a child."""
_building: set[Path] = set()
_building_lock = threading.Lock()


@contextlib.contextmanager
def _one_at_a_time(owner: Path) -> Iterator[None]:
    """Hold the only build of an owner's indexes, or refuse at once."""
    with _building_lock:
        if owner in _building or len(_building) >= MAX_BUILDS:
            message = "the index of your contamination lists is being built, or those of others are; send this call again in some seconds"
            raise Unavailable(message, code="index_being_built")
        _building.add(owner)
    try:
        yield
    finally:
        with _building_lock:
            _building.discard(owner)


def is_indexed(platform: Platform, tenant: str) -> bool:
    """Whether :func:`index_directory` has nothing to build or fetch."""
    rows = list_suites(platform, tenant)
    return _all_shipped(rows) or (_index_place(platform, tenant, rows) / DONE).exists()


def _all_shipped(found: Sequence[Suite]) -> bool:
    """Whether no suite is registered, so that one small index serves every tenant."""
    return all(suite.object_key is None for suite in found)


def _index(platform: Platform, tenant: str) -> Path:
    rows = list_suites(platform, tenant)
    target = _index_place(platform, tenant, rows)
    if _all_shipped(rows):
        return shipped_index(target.parent)
    if (target / DONE).exists():
        mark_used(target)
        return target
    remove_unused(target.parents[1])
    prefix = layout.suite_index_prefix(tenant, target.name)
    if platform.objects.exists(f"{prefix}/{DONE}"):
        download(platform.objects, prefix, target, last=DONE)
    else:
        _build(platform, tenant, rows, target)
        upload(platform.objects, target, prefix, last=DONE)
    return target


def _index_place(platform: Platform, tenant: str, found: Sequence[Suite]) -> Path:
    if _all_shipped(found):
        return shipped_place(platform.settings.work_dir / "shipped_suites")
    return _place(platform, tenant, _digest(found))


def _place(platform: Platform, tenant: str, digest: str) -> Path:
    return platform.settings.work_dir / "suite_indexes" / layout.checked_id(tenant) / digest


def _build(platform: Platform, tenant: str, found: Sequence[Suite], target: Path) -> None:
    """Build in a separate process and directory, then rename: concurrent builds are identical, and one of them is kept."""
    with scratch.directory(platform.settings.work_dir, tenant) as directory:
        made, items = directory / target.name, {}
        made.mkdir()
        for suite in found:
            if suite.object_key is not None:
                items[label(suite)] = str(directory / f"{suite.id}.jsonl")
                platform.objects.get_file(suite.object_key, Path(items[label(suite)]))
        order = {"shipped": [suite.name for suite in found if suite.object_key is None], "suites": items, "target": str(made)}
        limits = Limits(wall_s=INDEX_WALL_S, memory_bytes=platform.settings.validation_memory_bytes)
        run_sandboxed(INDEXER, order, directory, limits=limits, what="contamination lists")
        (made / DONE).touch()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.rename(target)
        except OSError:
            if not (target / DONE).exists():
                raise


def label(suite: Suite) -> str:
    """Return its name in reports; a tenant's suite may have the same name as one of the operator's."""
    return suite.name if suite.tenant_id is None else f"own/{suite.name}"


def _digest(found: Sequence[Suite]) -> str:
    spelled = json.dumps(sorted((label(suite), suite.sha256) for suite in found))
    return hashlib.sha256(spelled.encode()).hexdigest()


def _of(conn: Connection, tenant: str | None) -> Sequence[Suite]:
    table = eval_suites
    owned = table.c.tenant_id.is_(None) if tenant is None else table.c.tenant_id.is_(None) | (table.c.tenant_id == tenant)
    return many(conn, sa.select(table).where(owned).order_by(table.c.tenant_id.nulls_first(), table.c.name), Suite)


def _space(platform: Platform, tenant: str | None, max_bytes: int) -> _Space:
    """Return how many bytes of items may still be added beside the present suites."""
    if tenant is None:
        return _Space(left=max_bytes, keys=frozenset())
    with platform.engine.begin() as conn:
        _check_accepts(conn, tenant)
        keys = _own_keys(conn, tenant)
    stored = platform.objects.list(f"{layout.tenant_prefix(tenant)}/suites")
    return _Space(left=max(0, max_bytes - sum(o.size_bytes for o in stored if o.key in keys)), keys=keys)


def _own_keys(conn: Connection, tenant: str) -> frozenset[str]:
    return frozenset(conn.execute(sa.select(eval_suites.c.object_key).where(eval_suites.c.tenant_id == tenant)).scalars())


def _check_accepts(conn: Connection, tenant: str | None) -> None:
    if tenant is None:
        return
    find_tenant(conn, tenant, lock=True)  # one at a time
    refuse_while_deleted(conn, tenant)
    num = conn.execute(sa.select(sa.func.count()).where(eval_suites.c.tenant_id == tenant)).scalar_one()
    if num >= MAX_SUITES:
        raise QuotaExceeded(f"limit of contamination lists reached ({num}, limit {MAX_SUITES}); remove one first", code="too_many_suites")


def _no_space(left: int) -> InvalidRequest:
    return InvalidRequest(
        f"the items take more than the {left:,} bytes that are left of {MAX_ITEM_BYTES >> 20} MiB for contamination lists; give a part of "
        "them, name fewer fields, or remove another list",
        code="invalid_suite",
        param="file",
    )


def _fields(field: str) -> list[str]:
    wanted = list(dict.fromkeys(name.strip() for name in field.split(",") if name.strip()))
    if not wanted:
        raise InvalidRequest("field is empty; name the field that holds the question", code="invalid_suite", param="field")
    if len(wanted) > MAX_FIELDS:
        raise InvalidRequest(
            f"field names {len(wanted)} fields, and at most {MAX_FIELDS} make an item; name those that ask and answer",
            code="invalid_suite",
            param="field",
        )
    return wanted


def _texts(path: Path, filename: str, wanted: Sequence[str], column_map: Mapping[str, str] | None) -> Iterator[str]:
    for row in open_rows(path, filename=filename, column_map=column_map, max_bytes=MAX_FILE_BYTES).rows:
        value: Any = row.value
        if isinstance(value, Problem):
            raise InvalidRequest(
                f"row {row.number} of {filename} cannot be read: {value.message} ({value.code}); {value.fix}",
                code="invalid_suite",
                param="file",
            )
        found = [field_text(value, name) for name in wanted] if isinstance(value, dict) else [""]
        if not all(found):
            raise InvalidRequest(
                f"row {row.number} of {filename} has no text in {' and '.join(wanted)}; every row of a contamination list needs it",
                code="invalid_suite",
                param="field",
            )
        yield "\n".join(found)


def _write_items(texts: Iterator[str], path: Path, *, max_bytes: int) -> int:
    num_items = num_bytes = 0
    with path.open("w") as out:
        for num_items, text in enumerate(texts, start=1):
            if num_items > MAX_ITEMS:
                raise InvalidRequest(
                    f"a contamination list has at most {MAX_ITEMS} items; give a part of it", code="invalid_suite", param="file"
                )
            line = json.dumps(text) + "\n"
            num_bytes += len(line)
            if num_bytes > max_bytes:
                raise _no_space(max_bytes)
            out.write(line)
    if not num_items:
        raise InvalidRequest("the list's file holds no rows; write one item a line", code="invalid_suite", param="file")
    return num_items


def _receive(stream: BinaryIO, path: Path) -> None:
    num_bytes = 0
    with path.open("wb") as out:
        while chunk := stream.read(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > MAX_FILE_BYTES:
                raise InvalidRequest(f"a list's file has at most {MAX_FILE_BYTES >> 20} MiB", code="file_too_large", param="file")
            out.write(chunk)
