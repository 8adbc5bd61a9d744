"""``python -m resources.inference.fetch_package``: fetches a registered model's files to a directory and checks their sha256.

Runs in a model server's pod before the server. If a file differs from the registered one, it fails and the server does not start.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from control_plane.platform import settings as settings_module
from control_plane.platform.protocols import ObjectStore
from core.base_models import CHANGED, model_digest
from core.errors import FtError, IntegrityError
from engine.adapters import MODEL_CONFIG, PACKAGE_MANIFEST, TOKENIZER_FILES, check_package_files, is_whole_model, manifest_files
from resources import object_store

GENERATION = "generation_config.json"
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = settings_module.load()
        store = object_store.of_settings(settings)
        fetch(store, args.prefix, manifest_sha256=args.manifest_sha256, into=args.into)
        if args.base_dir is not None:
            add_tokenizer(args.base_dir, base_digest=args.base_digest, into=args.into)
    except (FtError, OSError) as e:
        log.error("%s", e)
        return 1
    log.info("fetched the registered files to %s", args.into)
    return 0


def fetch(store: ObjectStore, prefix: str, *, manifest_sha256: str, into: Path) -> None:
    """Fetch the files in the manifest under `prefix`; raises ``IntegrityError`` unless all are the registered ones.

    Replaces the contents of `into`, so an interrupted call can be repeated.
    """
    into.mkdir(parents=True, exist_ok=True)
    for old in into.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    store.get_file(f"{prefix}/{PACKAGE_MANIFEST}", into / PACKAGE_MANIFEST)
    for name in manifest_files((into / PACKAGE_MANIFEST).read_bytes(), sha256=manifest_sha256):
        if Path(name).name != name:
            raise IntegrityError(f"the manifest under {prefix} lists {name!r}, which is not the name of a file beside it")
        store.get_file(f"{prefix}/{name}", into / name)
    if wrong := check_package_files(into, manifest_sha256=manifest_sha256):
        raise IntegrityError(f"{prefix}: {'; '.join(r.detail for r in wrong)}; restore its files from a backup")


def add_tokenizer(base_dir: Path, *, base_digest: str, into: Path) -> None:
    """Copy the base model's tokenizer and template next to a whole model's weights, after checking the base's digest."""
    actual = model_digest(base_dir)
    if actual != base_digest:
        raise IntegrityError(
            f"the base model in {base_dir} has digest {actual}, but the model was trained from {base_digest}", code=CHANGED
        )
    if not is_whole_model(into):
        raise IntegrityError(f"{into} has no {MODEL_CONFIG}: it is an adapter, which does not get its own server")
    for name in (*TOKENIZER_FILES, GENERATION):
        if (base_dir / name).is_file() and not (into / name).exists():
            shutil.copyfile(base_dir / name, into / name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resources.inference.fetch_package", description=__doc__)
    parser.add_argument("--prefix", required=True, help="key of the package in the object store (FT_OBJECT_STORE)")
    parser.add_argument("--manifest-sha256", required=True, help="sha256 of its manifest in the registry")
    parser.add_argument("--into", type=Path, required=True, help="directory to fill; its contents are replaced")
    parser.add_argument("--base-dir", type=Path, help="directory of the base model, whose tokenizer and template are added")
    parser.add_argument("--base-digest", default="", help="digest of the base model in the registry")
    return parser


if __name__ == "__main__":
    sys.exit(main())
