"""Reference log-probabilities of a pack of answers: computed once for a starting model, stored beside the packs, reused.

They are computed while a job is prepared, before it waits for GPUs, by a process of this machine. For a base model that needs a GPU for a
forward pass, preparation must run on a machine that has one.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.capacity import gpu_devices as devices
from control_plane.jobs import warm_starts
from control_plane.platform.build_lock import Say, one_anywhere, one_on_this_machine
from control_plane.platform.context import Platform
from control_plane.platform.transfer import download, upload
from control_plane.queue import reservations
from ft_assets import layout
from ft_assets.datasets.pack_cache import fetch_pack
from ft_assets.errors import IntegrityError, Unavailable
from ft_assets.training.reference_logps import MANIFEST, ReferenceManifest, reference_key, verify
from ft_assets.training.spec import Quantization, TrainingSpec, WarmStart

log = logging.getLogger(__name__)

ATTENTION = "sdpa"
"""Device of every reference: any machine has it, and it differs from training only by rounding."""
RUNTIME = "ft_assets.training.runtime.reference"
SHOWN_CHARACTERS = 2000
"""Characters of the output of a failed computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    manifest: ReferenceManifest
    directory: Path
    """Directory on this machine, verified."""
    reused: bool
    """They already existed; no forward pass was made."""
    uri: str


def key_for(spec: TrainingSpec) -> str:
    """Returns the key of the reference that a training of `spec` needs."""
    adapter = None if spec.warm_start is None else spec.warm_start.manifest_sha256
    quantization = spec.quantization
    return reference_key(spec.pack_fingerprint, spec.base_digest, spec.precision, ATTENTION, quantization=quantization, adapter=adapter)


def for_spec(platform: Platform, tenant: str, spec: TrainingSpec, *, who: str, say: Say = log.info) -> Reference:
    """Returns :func:`reference` as a training of `spec` needs it."""
    return reference(
        platform,
        tenant,
        pack_fingerprint=spec.pack_fingerprint,
        model=spec.base_model,
        base_digest=spec.base_digest,
        who=who,
        precision=spec.precision,
        quantization=spec.quantization,
        warm_start=spec.warm_start,
        say=say,
    )


def reference(
    platform: Platform,
    tenant: str,
    *,
    pack_fingerprint: str,
    model: str,
    base_digest: str | None = None,
    who: str,
    precision: str = "fp32",
    attention: str = ATTENTION,
    quantization: Quantization | None = None,
    warm_start: WarmStart | None = None,
    python: Sequence[str] = (sys.executable,),
    say: Say = log.info,
) -> Reference:
    """Returns the log-probabilities of the stored pack under the model that training starts from.

    That is the base (`base_digest`: the promised bytes, by default the current ones), quantized as for training, with the adapter of a warm
    start. One process computes at a time across all machines. `who` is shown to others that wait, a job's id; `python` starts an
    interpreter that has torch.
    """
    base = platform.models.get(model) if base_digest is None else platform.models.get_pinned(model, base_digest)
    if base.directory is None:
        raise Unavailable(f"base model {model} is not on this machine", code="base_model_unavailable")
    adapter = None if warm_start is None else warm_start.manifest_sha256
    key = reference_key(pack_fingerprint, base.digest, precision, attention, quantization=quantization, adapter=adapter)
    directory = platform.settings.work_dir / "references" / layout.checked_id(tenant) / key
    uri = platform.objects.uri(layout.reference_prefix(tenant, key))
    with one_on_this_machine(directory, who=who, say=say):
        if (found := _stored(platform, tenant, key, directory)) is not None:
            return Reference(manifest=found, directory=directory, reused=True, uri=uri)
        with one_anywhere(platform.engine, tenant, key, who=who, say=say):
            if (found := _stored(platform, tenant, key, directory)) is not None:
                return Reference(manifest=found, directory=directory, reused=True, uri=uri)
            pack_dir = fetch_pack(platform, tenant, pack_fingerprint)
            say(f"computing reference log-probabilities {key}")
            options: dict[str, object] = {"pack": pack_dir, "base": base.directory, "base-digest": base.digest, "out": directory}
            options |= {"precision": precision, "attention": attention, "die-with-parent": os.getpid()}
            if warm_start is not None:
                options["adapter"] = warm_starts.fetch(platform, tenant, warm_start)
            if quantization is not None:
                options["quantization"] = quantization.kind
            flags = ["--single-quantization"] if quantization is not None and not quantization.double else []
            command = [*python, "-m", RUNTIME, *(f"--{name}={value}" for name, value in options.items()), *flags]
            with devices.shared(platform.settings.work_dir, reservations.held_devices(platform)) as gpu:
                _compute(command, env={**os.environ, devices.VISIBLE: "" if gpu is None else gpu.name})
            manifest = verify(directory)
            if manifest.key != key:
                raise IntegrityError(
                    f"reference log-probabilities {key} were computed under {manifest.key}; the base model's files changed"
                )
            upload(platform.objects, directory, layout.reference_prefix(tenant, key))
            return Reference(manifest=manifest, directory=directory, reused=False, uri=uri)


def _stored(platform: Platform, tenant: str, key: str, directory: Path) -> ReferenceManifest | None:
    """Returns those of the object store, in this machine's cache and verified; None if they are missing, or damaged there too.

    Keeps what a computation left unfinished here, to be continued.
    """
    prefix = layout.reference_prefix(tenant, key)
    if not platform.objects.exists(f"{prefix}/{MANIFEST}"):
        return None
    try:
        return verify(directory)
    except IntegrityError:  # missing, or damaged on this machine
        shutil.rmtree(directory, ignore_errors=True)
    download(platform.objects, prefix, directory, last=MANIFEST)
    try:
        return verify(directory)
    except IntegrityError as damage:
        log.warning("stored reference log-probabilities are damaged and are computed again: %s", damage)
        return None


def _compute(command: Sequence[str], *, env: Mapping[str, str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env, check=False)
    if done.returncode:
        raise Unavailable(
            f"reference log-probabilities were not computed (exit code {done.returncode}); finished files are kept, so try again. "
            f"Its last words: {done.stdout[-SHOWN_CHARACTERS:].strip()}"
        )
