"""``python -m resources.inference.fetch_package``: a registered model's files, fetched to a directory, each held against its sha256.

What runs in the pod of a model server before the server. It ends with an error, and the server does not start, where a byte differs
from what was registered.
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
from ft_assets.adapters import package, whole_model
from ft_assets.adapters.exports.archive import TOKENIZER
from ft_assets.base_models import CHANGED, model_digest
from ft_assets.errors import FtError, IntegrityError
from resources import object_store

GENERATION = "generation_config.json"
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        store = object_store.from_url(settings_module.load().object_store)
        fetch(store, args.prefix, manifest_sha256=args.manifest_sha256, into=args.into)
        if args.base_dir is not None:
            add_tokenizer(args.base_dir, base_digest=args.base_digest, into=args.into)
    except (FtError, OSError) as e:
        log.error("%s", e)
        return 1
    log.info("%s holds the registered files", args.into)
    return 0


def fetch(store: ObjectStore, prefix: str, *, manifest_sha256: str, into: Path) -> None:
    """The files that the manifest under `prefix` lists; ``IntegrityError`` unless all of them are the registered ones.

    Called again after it was cut off, it starts anew: what lies in `into` is replaced.
    """
    into.mkdir(parents=True, exist_ok=True)
    for old in into.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    store.get_file(f"{prefix}/{package.MANIFEST}", into / package.MANIFEST)
    for name in package.manifest_files((into / package.MANIFEST).read_bytes(), sha256=manifest_sha256):
        if Path(name).name != name:
            raise IntegrityError(f"the manifest under {prefix} lists {name!r}, which is not the name of a file beside it")
        store.get_file(f"{prefix}/{name}", into / name)
    if wrong := package.check_files(into, manifest_sha256=manifest_sha256):
        raise IntegrityError(f"{prefix}: {'; '.join(r.detail for r in wrong)}; restore its files from a backup")


def add_tokenizer(base_dir: Path, *, base_digest: str, into: Path) -> None:
    """Tokenizer and template of the base model beside a whole model's weights, after the base's bytes were found to be the pinned ones."""
    actual = model_digest(base_dir)
    if actual != base_digest:
        raise IntegrityError(f"the base model in {base_dir} has digest {actual}, and {base_digest} was trained from", code=CHANGED)
    if not whole_model.is_whole(into):
        raise IntegrityError(f"{into} holds no {whole_model.MODEL_CONFIG}; an adapter needs no server of its own")
    for name in (*TOKENIZER, GENERATION):
        if (base_dir / name).is_file() and not (into / name).exists():
            shutil.copyfile(base_dir / name, into / name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resources.inference.fetch_package", description=__doc__)
    parser.add_argument("--prefix", required=True, help="key of the package in the object store (FT_OBJECT_STORE)")
    parser.add_argument("--manifest-sha256", required=True, help="of its manifest, as the registry states it")
    parser.add_argument("--into", type=Path, required=True, help="directory to fill; what is in it is replaced")
    parser.add_argument("--base-dir", type=Path, help="directory of the base model, whose tokenizer and template are put beside")
    parser.add_argument("--base-digest", default="", help="of the base model, as the registry states it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
