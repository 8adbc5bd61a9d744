"""Hard links to every object of a local store: an object that is deleted while a backup runs stays readable until the backup has it.

Objects are whole files that are renamed into place and never written to again, so a link is a copy that costs no space.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from control_plane.platform.protocols import ObjectStore
from core.errors import Conflict, Unavailable
from resources.object_store.local import STAGING, LocalObjectStore

LINKS, LOCK = ".backup", ".backup.lock"
"""Directory of the links, in the store: no key starts with a dot, so no reader of the store sees it."""


class ObjectLinks:
    """Links under `roots`, the directories of a store; made by :func:`held`."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)

    def add(self) -> int:
        """Link every object that has no link yet, or was replaced since; returns how many."""
        return sum(_link(root / path, root / LINKS / path) for root in self.roots for path in _files(root))

    def has(self, prefix: str) -> bool:
        """Whether an object, or one under the prefix, is linked."""
        return any(path.is_file() or any(_files(path)) for path in (root / LINKS / prefix for root in self.roots))

    def drop_deleted(self, referred: Callable[[Collection[str]], Collection[str]]) -> int:
        """Remove the links of objects that are deleted by now and that nothing refers to; returns how many.

        `referred` gets paths of objects and of the directories above them, and returns those that something refers to.
        """
        gone = {path: link for path, link in self.files() if not any((root / path).exists() for root in self.roots)}
        above = {path: {path, *(str(p) for p in PurePosixPath(path).parents)} for path in gone}
        needed = set(referred(set().union(*above.values())))
        dropped = [link for path, link in gone.items() if not needed & above[path]]
        for link in dropped:
            link.unlink()
        return len(dropped)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield each object's path in the store and its link."""
        for root in self.roots:
            for path in _files(root / LINKS):
                yield path, root / LINKS / path

    def remove(self) -> bool:
        """Remove all links; returns whether there were any."""
        found = [root / LINKS for root in self.roots if (root / LINKS).exists()]
        for links in found:
            shutil.rmtree(links, ignore_errors=True)
        return bool(found)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep backups of the store at `root`, and exchanges of its keys, from running at once; ``Conflict`` while another one runs."""
    try:
        lock = FileLock(root / LOCK).acquire(timeout=0)
    except Timeout:
        message = f"a backup of {root}, or an exchange of its keys, is running; wait for its end"
        raise Conflict(message, code="backup_running") from None
    with lock:
        yield


@contextmanager
def held(roots: Sequence[Path]) -> Iterator[ObjectLinks]:
    """Yield links that nothing else uses, and remove them at the end, as those of a backup that was killed are first.

    Raises ``Conflict`` while another backup of the store has them, or its keys are being exchanged.
    """
    links = ObjectLinks(roots)
    with locked(roots[0]):
        try:
            links.remove()
            yield links
        finally:
            links.remove()


def remove_abandoned(store: ObjectStore) -> bool:
    """Remove what a backup that was killed left behind, which would keep deleted objects; returns whether there was anything."""
    if not isinstance(store, LocalObjectStore) or not (store.root / LINKS).exists():
        return False
    with suppress(Conflict), held([root for root in (store.root, store.cold) if root is not None]):
        return True
    return False


def _files(root: Path, under: str = "") -> Iterator[str]:
    """Yield the files below `root` by their paths relative to it, sorted within each directory; no symbolic links."""
    try:
        found = sorted(os.scandir(root / under), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        path = f"{under}{entry.name}"
        if path in (STAGING, LINKS, LOCK) or entry.is_symlink():
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(root, f"{path}/")
        else:
            yield path


def _link(source: Path, link: Path) -> bool:
    try:
        if link.exists():
            if link.samefile(source):
                return False
            link.unlink()
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, link)
    except FileNotFoundError:  # deleted since its directory was read
        return False
    except OSError as error:
        raise Unavailable(
            f"{source} cannot be linked ({error.strerror}), so objects may disappear while they are copied; put the object store on a file "
            "system with hard links", code="object_links_refused",
        ) from error  # fmt: skip
    return True
