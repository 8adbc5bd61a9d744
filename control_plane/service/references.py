"""Reference log-probabilities of a preference pack: computed once for a base model, stored beside the packs, reused by all jobs."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.service.building import Say, one_anywhere, one_on_this_machine
from control_plane.service.platform import Platform
from control_plane.service.training import download, fetch_pack, upload
from ft_assets import layout
from ft_assets.errors import IntegrityError, Unavailable
from ft_assets.training.reference import MANIFEST, ReferenceManifest, reference_key, verify

log = logging.getLogger(__name__)

RUNTIME = "ft_assets.training.runtime.reference"
SHOWN_CHARACTERS = 2000
"""Of the output of a computation that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    manifest: ReferenceManifest
    directory: Path
    """On this machine, verified."""
    reused: bool
    """They were there already; no forward pass was made."""
    uri: str


def reference(
    platform: Platform,
    tenant: str,
    *,
    pack_fingerprint: str,
    model: str,
    who: str,
    precision: str = "fp32",
    attention: str = "sdpa",
    python: Sequence[str] = (sys.executable,),
    say: Say = log.info,
) -> Reference:
    """The log-probabilities of the stored pack under the base model; computed by one process at a time, wherever the others are.

    `who` is what others are told to wait for, a job's id; `python` starts an interpreter that has torch.
    """
    base = platform.models.get(model)
    if base.directory is None:
        raise Unavailable(f"base model {model} is not on this machine", code="base_model_unavailable")
    key = reference_key(pack_fingerprint, base.digest, precision, attention)
    directory = platform.settings.work_dir / "references" / layout.checked_id(tenant) / key
    uri = platform.objects.uri(layout.reference_prefix(tenant, key))
    with one_on_this_machine(directory, who=who, say=say):
        if (found := _stored(platform, tenant, key, directory)) is not None:
            return Reference(manifest=found, directory=directory, reused=True, uri=uri)
        with one_anywhere(platform.engine, tenant, key, who=who, say=say):
            if (found := _stored(platform, tenant, key, directory)) is not None:
                return Reference(manifest=found, directory=directory, reused=True, uri=uri)
            pack_dir = fetch_pack(platform, tenant, pack_fingerprint)
            options = {"pack": pack_dir, "base": base.directory, "base-digest": base.digest, "out": directory}
            options |= {"precision": precision, "attention": attention, "die-with-parent": os.getpid()}
            _compute([*python, "-m", RUNTIME, *(f"--{name}={value}" for name, value in options.items())])
            manifest = verify(directory)
            upload(platform.objects, directory, layout.reference_prefix(tenant, key))
            return Reference(manifest=manifest, directory=directory, reused=False, uri=uri)


def _stored(platform: Platform, tenant: str, key: str, directory: Path) -> ReferenceManifest | None:
    """Those of the object store, in this machine's cache and verified; None where they are absent, or damaged there too.

    What a computation left here unfinished stays, to be gone on with.
    """
    prefix = layout.reference_prefix(tenant, key)
    if not platform.objects.exists(f"{prefix}/{MANIFEST}"):
        return None
    try:
        return verify(directory)
    except IntegrityError:  # absent, or damaged on this machine
        shutil.rmtree(directory, ignore_errors=True)
    download(platform.objects, prefix, directory, last=MANIFEST)
    try:
        return verify(directory)
    except IntegrityError as damage:
        log.warning("stored reference log-probabilities are damaged and are computed again: %s", damage)
        return None


def _compute(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        raise Unavailable(
            f"reference log-probabilities were not computed (exit code {done.returncode}); finished files are kept, so try again. "
            f"Its last words: {done.stdout[-SHOWN_CHARACTERS:].strip()}"
        )
